"""Program that calls every bundle of a folder, for the Python that ``python.sh`` makes.

It only imports packages of a machine that runs bundles. The folder has ``NAME.vmfb`` and ``NAME.pickle``, a list of
arguments; the program writes ``NAME.results``.
"""

import json
import pickle
import sys
from pathlib import Path

import ml_dtypes  # noqa: F401  (pickles of bf16 need it)
import numpy as np

from aotc.vmfb.host.machine import cpu_features
from aotc.vmfb.module import load
from aotc.vmfb.profile import roofline as roof


def doubled(x: np.ndarray, out: np.ndarray) -> None:
    """Double the elements: a custom call that only this machine registers."""
    out[:] = x + x


def main(folder: Path) -> dict[str, object]:
    """Call all bundles and write their results; return the processor's features and each bundle's target."""
    targets, dispatches = {}, 0
    for path in sorted(folder.glob("*.vmfb")):
        functions = {"doubled": doubled} if path.stem == "python" else {}
        module = load(str(path), threads=2, custom_calls=functions)
        targets[path.stem] = module.stats()["target"]
        arguments = pickle.loads(path.with_suffix(".pickle").read_bytes())
        with module.profile() as recording:
            results = module.invoke("main", *arguments)
        dispatches += len(recording.dispatches)
        path.with_suffix(".results").write_bytes(pickle.dumps([np.asarray(x) for x in results]))
    peak = roof.peak_loop_of_machine() is not None and roof.roof_of(1 << 16).flops > 0
    return {"features": sorted(cpu_features()), "targets": targets, "dispatches": dispatches, "peak": peak}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
