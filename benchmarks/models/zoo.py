"""Models of flax, equinox, keras and transformers.

Each in its own process; results are compared. One thread, processor time of all processes. ``--write`` writes the
figures to examples/zoo/measured.json, from which ``python docs/make_zoo.py`` generates the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from benchmarks import children, options, report, timing

MEASURED = children.ROOT / "examples/zoo/measured.json"


def measure(name: str, small: bool, rounds: int, seconds: float) -> dict[str, Any]:
    """Export, compile, load, compare and time a model; return the figures."""
    import jax

    import aotc
    from benchmarks.compile.processes import processor_time
    from benchmarks.peers.jax_jit import largest_error
    from examples.zoo.models import ZOO

    clock = timing.pin(1)
    model = ZOO[name].build(small)
    with TemporaryDirectory() as folder:
        exported, bundle = Path(folder, f"{name}.jax"), Path(folder, f"{name}.vmfb")
        jitted = jax.jit(model.function)
        exported.write_bytes(jax.export.export(jitted)(*model.inputs).serialize())
        start = processor_time()
        aotc.compile(exported, cache=False, source=False).save(bundle)
        compiled = processor_time() - start
        module = aotc.load(bundle, threads=1)
        there = jax.device_put(model.inputs)
        start = clock()
        theirs = jax.block_until_ready(jitted(*there))
        theirs_compiled = clock() - start
        error = largest_error(jax.tree.leaves(module(*model.inputs)), jax.tree.leaves(theirs))
        if not error < 1e-3:
            raise SystemExit(f"{name}: error {error:.1e} of the largest value")
        calls = {"aotc": lambda: module(*model.inputs), "XLA": lambda: jax.block_until_ready(jitted(*there))}
        times = timing.interleaved(calls, rounds=rounds, seconds=seconds, clock=clock)
        return {
            "parameters": sum(x.size for x in jax.tree.leaves(model.weights)), "bundle": bundle.stat().st_size,
            "compile": compiled, "jit": theirs_compiled, "error": error, "call": times.median("aotc"),
            "ratio": times.ratio("aotc", "XLA").median,
        }  # fmt: skip


def run(
    only: options.Only = "",
    small: Annotated[bool, typer.Option("--small", help="The small form, which the tests run.")] = False,
    rounds: options.Rounds = 7,
    seconds: options.Seconds = 0.3,
    write: Annotated[bool, typer.Option("--write", help="Write the figures for docs/zoo.md.")] = False,
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> int:
    """Print a row for each model; return 1 if one fails."""
    small = small or timing.SMOKE
    if one:
        print(json.dumps(measure(one, small, rounds, seconds)))
        return 0
    from examples.zoo.models import ZOO

    columns = [report.Column("M params", 1e-6), report.Column("MB", 1e-6), report.Column("compile s")]
    table = report.Table("model", *columns, report.ms("call"), report.ratio("of jax.jit"), report.Column("error"))
    failed = 0
    for name in options.select(ZOO, only):
        words = ["--one", name, "--rounds", rounds, "--seconds", seconds, *["--small"] * small]
        try:
            printed = children.output(children.suite("models", "zoo", *words), PYTHONWARNINGS="ignore")
        except RuntimeError as error:
            table.failed(name, error)
            failed = 1
            continue
        row = json.loads(printed.splitlines()[-1])
        table.add(name, *(row[key] for key in ("parameters", "bundle", "compile", "call", "ratio", "error")))
        if write:
            before = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
            MEASURED.write_text(json.dumps({**before, name: row}, indent=1, sort_keys=True) + "\n")
    return failed
