"""Process of one state of aotc for ``before_after``: started by its path, so it imports nothing of this package.

It compiles the model of a folder. For each line with a number of samples it prints their median.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from pathlib import Path

CALLS = ("call", "recorded")  # the kinds that time calls, not loads


def main(folder: Path, threads: int, what: str) -> None:
    """Compile the model of ``folder``, then answer each line with a median."""
    import numpy as np

    import aotc

    with np.load(folder / "inputs.npz") as stored:
        inputs = [stored[name] for name in stored.files]
    bundle = folder / f"{os.getpid()}.vmfb"
    bundle.write_bytes(aotc.compile(folder / "model.jaxexp"))
    module = aotc.load(bundle, threads=threads)
    arguments = [inputs[n] for n in np.load(folder / "kept.npy")]

    def sample() -> float:
        called = module if what in CALLS else None
        clock = time.perf_counter if what in CALLS and threads > 1 else time.thread_time
        start = clock()
        if called is None:
            called = aotc.load(bundle, threads=threads)
            if what == "load":
                return clock() - start
            start = clock()
        called.invoke("main", *arguments)
        return clock() - start

    for line in sys.stdin:
        with module.profile() if what == "recorded" else contextlib.nullcontext():
            times = [sample() for _ in range(int(line) + 1)]
        print(statistics.median(times[1:]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
