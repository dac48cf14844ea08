"""Compare two states of aotc: ``python benchmarks/before_after.py ../old diffrax_lorenz mlp_bf16 --threads 1``.

The first argument is a folder with another state of the sources, as ``git worktree add ../old COMMIT`` makes one. Each
state compiles the model for itself and lives in a process of its own; they are asked in turn, round by round. The ratio
is the median over the rounds of the ratio of medians, after to before. ``load:tiny_add`` times ``aotc.load`` of the
bundle, of which the process holds another one, instead of calls; ``first:tiny_add`` the first call after each load.
``recorded:tiny_add`` times calls of one state, the after's within ``with module.profile()``.
These, and calls of one thread, count the processor's time, for a busy machine's sake.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CALLS = ("call", "recorded")  # of what there is to time, what is no load


def answer(folder: Path, threads: int, what: str) -> None:
    """Compile the model of ``folder``, then write the median of each number of samples that is asked for."""
    import numpy as np

    import aotc

    with np.load(folder / "inputs.npz") as stored:
        inputs = [stored[name] for name in stored.files]
    bundle = folder / f"{os.getpid()}.vmfb"
    bundle.write_bytes(aotc.compile(folder / "model.jaxexp"))
    module = aotc.load(bundle, threads=threads)
    kept = [inputs[n] for n in np.load(folder / "kept.npy")]

    def sample() -> float:
        called = module if what in CALLS else None
        clock = time.perf_counter if what in CALLS and threads > 1 else time.thread_time
        start = clock()
        if called is None:
            called = aotc.load(bundle, threads=threads)
            if what == "load":
                return clock() - start
            start = clock()
        called.invoke("main", *kept)
        return clock() - start

    for line in sys.stdin:
        with module.profile() if what == "recorded" else contextlib.nullcontext():
            times = [sample() for _ in range(int(line) + 1)]
        print(statistics.median(times[1:]), flush=True)


def measure(name: str, before: Path, threads: int, rounds: int, calls: int) -> str:
    """Return one line about a model; a prefix of its name says what of it is timed."""
    what, name = name.split(":") if ":" in name else ("call", name)
    import numpy as np

    sys.path.insert(0, str(HERE))
    from run import export

    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder, "kept.npy"), export(name, Path(folder))["kept"])
        command = [sys.executable, str(HERE / "before_after.py"), "--answer", folder, "--threads", str(threads)]
        whats = ("call" if what == "recorded" else what, what)
        paths = [os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]) for root in (before, HERE.parent)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "cwd": folder}  # ``python -m`` looks here first
        states = [
            subprocess.Popen([*command, "--what", asked], env={**os.environ, "PYTHONPATH": path}, text=True, **pipes)  # type: ignore[call-overload]
            for path, asked in zip(paths, whats, strict=True)
        ]
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            for n in (0, 1) if turn % 2 else (1, 0):
                states[n].stdin.write(f"{calls}\n")
                states[n].stdin.flush()
                times[n].append(float(states[n].stdout.readline()))
        for state in states:
            state.stdin.close()
            state.wait()
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    first, second = (statistics.median(t) * 1e6 for t in times)
    return f"{what} of {name}, {threads} threads: before {first:.2f} us, after {second:.2f} us, ratio {ratio:.3f}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", type=Path, nargs="?", help="the folder of the other state")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--what", choices=(*CALLS, "load", "first"), help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer(given.answer, given.threads, given.what)
        return
    for name in given.models:
        print(measure(name, given.before.resolve(), given.threads, given.rounds, given.calls), flush=True)


if __name__ == "__main__":
    main()
