"""Compare aotc's run with JAX's answer: ``python compare.py FOLDER JAX_PYTHON``.

Runs in an environment without JAX; JAX runs in a process of the other one. Calls of both take turns.
"""

import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import aotc

COLD_AOTC = """
import sys, numpy, aotc
module = aotc.load(sys.argv[1] + "/model.vmfb")
module.invoke("main", numpy.load(sys.argv[1] + "/x.npy"))
"""
COLD_JAX = """
import sys, numpy, jax
call = jax.jit(jax.export.deserialize(bytearray(open(sys.argv[1] + "/model.jaxexp", "rb").read())).call)
x = numpy.load(sys.argv[1] + "/x.npy")
jax.block_until_ready(call(x))
"""
EACH_LINE = """
import time
for _ in sys.stdin:
    start = time.perf_counter()
    jax.block_until_ready(call(x))
    print(time.perf_counter() - start, flush=True)
"""


def cold_start(python, code, folder, runs):
    """Return the median seconds from starting the process to its end."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        subprocess.run([python, "-c", code, str(folder)], check=True)
        times.append(time.perf_counter() - start)
    return sorted(times)[runs // 2]


def latencies(jax_python, folder, rounds=30):
    """Return the median seconds of calls of aotc and of ``jax.jit``, which take turns."""
    module, x = aotc.load(folder / "model.vmfb"), np.load(folder / "x.npy")
    command = [jax_python, "-c", COLD_JAX + EACH_LINE, str(folder)]
    ours, theirs = [], []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        for _ in range(rounds):
            other.stdin.write("\n")
            theirs.append(float(other.stdout.readline()))
            start = time.perf_counter()
            module.invoke("main", x)
            ours.append(time.perf_counter() - start)
        other.stdin.close()
    return statistics.median(ours), statistics.median(theirs)


def main():
    """Print the table; exit with 1 if the answers differ."""
    folder, jax_python = Path(sys.argv[1]), sys.argv[2]
    absent = [name for name in ("jax", "numba", "llvmlite") if find_spec(name) is None]
    want = np.load(folder / "y_jax.npy").astype("float64")
    got = np.load(folder / "y_aotc.npy").astype("float64")
    error = float(np.abs(got - want).max() / np.abs(want).max())
    ours, theirs = latencies(jax_python, folder)
    rows = [
        ("not installed where it runs", ", ".join(absent)),
        ("largest error, of the largest value", f"{error:.1e}"),
        ("bundle", f"{(folder / 'model.vmfb').stat().st_size / 1e6:.1f} MB"),
        ("cold start, aotc", f"{cold_start(sys.executable, COLD_AOTC, folder, 3):.3f} s"),
        ("cold start, jax.jit of the export", f"{cold_start(jax_python, COLD_JAX, folder, 1):.3f} s"),
        ("latency, aotc", f"{1e3 * ours:.3f} ms"),
        ("latency, jax.jit", f"{1e3 * theirs:.3f} ms"),
    ]
    print("\n".join(f"{what:<40} {value}" for what, value in rows))
    if not error < 1e-3:
        sys.exit("the answers differ")


if __name__ == "__main__":
    main()
