"""Measure aotc beside its peers: ``python benchmarks/run.py --models tiny_add,bert_small --threads 2``.

Each engine lives in a process of its own and is asked in turn, round by round, so
that noise of the machine meets all of them. Before the clock starts each result is
compared with XLA's. Times are medians; a ratio is the median over the rounds of the
ratio of medians. Results: a table on stdout, JSON in ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Loaded = tuple[Callable[[], Any], Callable[[Any], list[Any]] | None]  # a call, and results to NumPy if they are not
ENGINES = {  # the package that each needs, and how pip calls it
    "xla": ("jax", "jax"), "aotc": ("aotc", "-e '.[compile]'"), "aotc_bf16": ("aotc", "-e '.[compile]'"),
    "iree": ("iree", "iree-base-compiler iree-base-runtime"), "onnxruntime": ("onnxruntime", "onnxruntime"),
    "openvino": ("openvino", "openvino"), "openvino_bf16": ("openvino", "openvino"),
}  # fmt: skip
AOTC_OPTIONS: dict[str, list[str]] = {"aotc": [], "aotc_bf16": ["--matmul-precision=bf16"]}
SHORT = 0.1  # what an engine may be wrong by that computes in bf16 what the model has in f32

# ---------------------------------------------------------------- export: one process per model


def export(name: str, folder: Path) -> dict[str, Any]:
    """Write ``name`` as a jax.export blob, as bytecode, with its inputs and XLA's results."""
    import jax
    import numpy as np
    from models import MODELS

    model = MODELS[name]()
    specs = jax.export.symbolic_args_specs(model.inputs, model.specs or ("...",) * len(model.inputs))
    exported = jax.export.export(jax.jit(model.function), platforms=("cpu",))(*specs)
    (folder / "model.jaxexp").write_bytes(exported.serialize())
    (folder / "model.mlirbc").write_bytes(exported.mlir_module_serialized)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model.inputs)]
    np.savez(folder / "inputs.npz", *leaves)
    results = [np.asarray(r) for r in jax.tree.leaves(jax.jit(exported.call)(*model.inputs))]
    np.savez(folder / "results.npz", *[r.astype("float64") if r.dtype.kind not in "iub" else r for r in results])
    return {"tolerance": model.tolerance, "kept": list(exported.module_kept_var_idx)}


# ---------------------------------------------------------------- engines


def load_xla(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    import jax

    exported = jax.export.deserialize(bytearray((folder / "model.jaxexp").read_bytes()))
    args, kwargs = jax.tree.unflatten(exported.in_tree, [jax.device_put(x) for x in inputs])
    call = jax.jit(exported.call).lower(*args, **kwargs).compile()
    return lambda: jax.block_until_ready(jax.tree.leaves(call(*args, **kwargs))), None


def load_aotc(
    folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, file: str = "aotc.vmfb"
) -> Loaded:  # fmt: skip
    import aotc

    module = aotc.load(folder / file, threads=threads)
    kept = [inputs[i] for i in facts["kept"]]
    return lambda: module.invoke("main", *kept), None


def load_aotc_bf16(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    facts["tolerance"] = max(facts["tolerance"], SHORT)
    return load_aotc(folder, inputs, facts, threads, "aotc_bf16.vmfb")


def load_iree(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    from iree import runtime

    runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
    config = runtime.Config("local-task")
    module = runtime.load_vm_module(runtime.VmModule.mmap(config.vm_instance, str(folder / "model.iree")), config)
    values = [runtime.asdevicearray(config.device, inputs[i]) for i in facts["kept"]]

    def call() -> list[Any]:
        found = module.main(*values)
        return list(found) if isinstance(found, (tuple, list)) else [found]

    return call, lambda found: [x.to_host() for x in found]


def load_onnxruntime(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    feed = {i.name: x for i, x in zip(session.get_inputs(), inputs)}
    return lambda: session.run(None, feed), None


def load_openvino(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    import openvino_peer

    return openvino_peer.load(folder, inputs, threads, "f32"), None


def load_openvino_bf16(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int) -> Loaded:
    import openvino_peer

    facts["tolerance"] = max(facts["tolerance"], SHORT)
    return openvino_peer.load(folder, inputs, threads, "bf16"), None


LOADERS = {
    "xla": load_xla, "aotc": load_aotc, "aotc_bf16": load_aotc_bf16, "iree": load_iree, "onnxruntime": load_onnxruntime,
    "openvino": load_openvino, "openvino_bf16": load_openvino_bf16,
}  # fmt: skip


def compile_for(engine: str, folder: Path) -> dict[str, Any]:
    """Compile the model for an engine, cold and (aotc) again with a filled cache; return seconds and bytes."""
    start = time.perf_counter()
    if engine in AOTC_OPTIONS:
        bundle = folder / f"{engine}.vmfb"
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "aotc_cli.main", "compile", folder / "model.jaxexp", "-q"]
            command += ["-o", bundle, *AOTC_OPTIONS[engine]]
            environment = {**os.environ, "AOTC_CACHE_DIR": cache}
            subprocess.run(command, check=True, env=environment, stderr=subprocess.PIPE, text=True)
            cold = time.perf_counter() - start
            subprocess.run(command, check=True, env=environment, stderr=subprocess.PIPE, text=True)
        warm = time.perf_counter() - start - cold
        return {"compile": cold, "compile_warm": warm, "bytes": bundle.stat().st_size}
    if engine == "iree":
        flags = ["--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host", "--iree-opt-data-tiling"]
        flags += ["--iree-input-type=stablehlo", "--iree-input-demote-i64-to-i32=false", "-o", folder / "model.iree"]
        tool = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
        subprocess.run([*tool, folder / "model.mlirbc", *flags], check=True, stderr=subprocess.PIPE, text=True)
        return {"compile": time.perf_counter() - start, "bytes": (folder / "model.iree").stat().st_size}
    if engine == "onnxruntime" and not (folder / "model.onnx").exists():
        tool = [sys.executable, HERE / "onnx_peer.py", folder.name, folder]
        subprocess.run(tool, check=True, capture_output=True, text=True)
    if engine.startswith("openvino"):
        tool = [sys.executable, HERE / "openvino_peer.py", folder.name, folder]
        subprocess.run(tool, check=True, capture_output=True, text=True)
        return {"compile": time.perf_counter() - start, "bytes": (folder / "openvino.bin").stat().st_size}
    return {}


# ---------------------------------------------------------------- the worker: one engine, one model


def check(got: list[Any], folder: Path, tolerance: float) -> float:
    """Return the largest error as a share of the result's largest value; raise if one is above ``tolerance``."""
    import numpy as np

    stored = np.load(folder / "results.npz")
    want = [stored[key] for key in stored.files]
    if len(got) != len(want):
        raise ValueError(f"{len(got)} results, expected {len(want)}")
    worst = 0.0
    for a, b in zip(got, want):
        a = np.asarray(a)
        if a.shape != b.shape:
            raise ValueError(f"shape {a.shape}, expected {b.shape}")
        if not b.size:
            continue
        wide = "complex128" if a.dtype.kind == "c" else "float64"
        scale = max(float(np.abs(b).max()), 1e-30)
        error = float(np.abs(a.astype(wide) - b.astype(wide)).max()) / scale
        if not error <= tolerance:
            raise ValueError(f"error {error:.2g} of the largest value, allowed {tolerance:g}")
        worst = max(worst, error)
    return worst


def work(engine: str, folder: Path, threads: int) -> None:
    """Load, check, then measure whenever a line with a number of seconds arrives."""
    import numpy as np

    facts = json.loads((folder / "facts.json").read_text())
    stored = np.load(folder / "inputs.npz")
    inputs = [stored[key] for key in stored.files]
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    begin = time.perf_counter()
    call, fetch = LOADERS[engine](folder, inputs, facts, threads)
    loaded = time.perf_counter()
    found = call()
    first = time.perf_counter()
    cold = time.time() - float(os.environ["BENCH_START"])
    error = check(fetch(found) if fetch else list(found), folder, facts["tolerance"])
    say = {"load": loaded - begin, "first": first - loaded, "cold": cold, "error": error}
    print(json.dumps(say), file=reply, flush=True)
    for line in sys.stdin:
        seconds, times = float(line), []
        end = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"times": times, "rss": rss}), file=reply, flush=True)


class Worker:
    """A process that runs one engine on ``threads`` cores."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        cores = set(sorted(os.sched_getaffinity(0))[:threads])
        environment = {**os.environ, "BENCH_START": repr(time.time()), "AOTC_NUM_THREADS": str(threads)}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", engine, "--folder", folder, "--threads", str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line, if any, and return the reply."""
        assert self.process.stdin
        assert self.process.stdout
        if line:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        found = self.process.stdout.readline()
        if not found:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError((self.log.read().strip().splitlines() or ["no reason given"])[-1][:300])
        return json.loads(found)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


# ---------------------------------------------------------------- the run


def measure(name: str, engines: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Return the record of one model."""
    folder = HERE / "data" / name
    folder.mkdir(parents=True, exist_ok=True)
    if args.export or not (folder / "facts.json").exists():
        subprocess.run([sys.executable, __file__, "--export-one", name, "--folder", folder], check=True)
    record: dict[str, Any] = {"model": name, "threads": args.threads, "engines": {e: {} for e in engines}}
    live: dict[str, Worker] = {}
    for engine in engines:
        facts = record["engines"][engine]
        try:
            facts.update(compile_for(engine, folder))
            starts = []
            for _ in range(max(args.cold, 1)):
                if engine in live:
                    live.pop(engine).close()
                live[engine] = Worker(engine, folder, args.threads)
                starts.append(live[engine].ask())
            facts.update({key: statistics.median(s[key] for s in starts) for key in starts[0]})
        except (RuntimeError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            facts["failed"] = next((line for line in lines if "error" in line.lower()), lines[-1])[:300]
            if engine in live:
                live.pop(engine).close()
    _rounds(record, live, args)
    return record


def _rounds(record: dict[str, Any], live: dict[str, Worker], args: argparse.Namespace) -> None:
    rounds: dict[str, list[float]] = {engine: [] for engine in live}
    order = list(live)
    for number in range(args.rounds + 1):  # the first warms up
        turn = number % max(len(order), 1)
        for engine in order[turn:] + order[:turn]:
            reply = live[engine].ask(str(args.seconds if number else args.seconds / 2))
            if number:
                rounds[engine].append(statistics.median(reply["times"]))
                record["engines"][engine]["rss"] = reply["rss"]
    for engine, medians in rounds.items():
        live[engine].close()
        facts = record["engines"][engine]
        facts["latency"] = statistics.median(medians)
        if "xla" in rounds:
            facts["ratio"] = statistics.median(a / b for a, b in zip(medians, rounds["xla"]))


def main() -> None:
    """Read the command line; run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="all")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="per engine and round")
    parser.add_argument("--cold", type=int, default=3, help="how many cold starts")
    parser.add_argument("--export", action="store_true", help="export the models again")
    for hidden in ("--worker", "--export-one", "--folder"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker, Path(args.folder), args.threads)
        return
    if args.export_one:
        facts = export(args.export_one, Path(args.folder))
        (Path(args.folder) / "facts.json").write_text(json.dumps(facts))
        return
    from models import MODELS
    from report import table

    names = list(MODELS) if args.models == "all" else args.models.split(",")
    engines = [e for e in args.engines.split(",") if importlib.util.find_spec(ENGINES[e][0])]
    for engine in set(args.engines.split(",")) - set(engines):
        print(f"{engine} is left out: pip install {ENGINES[engine][1]}", file=sys.stderr)
    machine = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    records = []
    out = HERE / "results" / f"threads{args.threads}.json"
    out.parent.mkdir(exist_ok=True)
    for name in names:
        try:
            records.append(measure(name, engines, args))
        except subprocess.CalledProcessError as error:
            print(f"{name}: cannot be exported here ({error.returncode})", file=sys.stderr)
            continue
        out.write_text(json.dumps({**machine, "when": time.strftime("%F"), "records": records}, indent=1))
        print(table(records[-1:]), flush=True)
    print(table(records))


if __name__ == "__main__":
    main()
