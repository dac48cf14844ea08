"""CUDA graphs of a call, to be replayed; and calls of ``jax.jit`` back to back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import aotc
from aotc.vmfb.devices.cuda import driver
from benchmarks.timing import Call, back_to_back


def need_gpu() -> None:
    """Exit with a message if this machine has no GPU."""
    if reason := driver.missing():
        raise SystemExit(f"this suite needs an NVIDIA GPU: {reason}; --compile, where a suite has it, needs none")


@dataclass(frozen=True, slots=True)
class GraphCall:
    """Replays of the CUDA graphs of one call, and the first of its results."""

    run: Call
    wait: Call
    result: Any

    def seconds(self) -> float:
        """Return the mean seconds of a replay among many."""
        return back_to_back(self.run, self.wait)


def graph_of(data: bytes, arguments: list[Any] | tuple[Any, ...]) -> GraphCall:
    """Load a bundle, call it, and return the CUDA graphs that the call ran."""
    graphs: list[tuple[Any, Any]] = []
    run_graph = driver.Gpu.run_graph

    def noted(self: Any, graph: Any) -> None:
        graphs.append((self, graph))
        run_graph(self, graph)

    driver.Gpu.run_graph = noted  # type: ignore[method-assign]
    try:
        module = aotc.load(data, devices="cuda")
        module.invoke("main", *arguments)
        graphs.clear()
        results = module.invoke("main", *arguments)
    finally:
        driver.Gpu.run_graph = run_graph  # type: ignore[method-assign]
    gpu = graphs[0][0]

    def replay(module: Any = module) -> None:  # the module has the graphs' memory
        for _, graph in graphs:
            run_graph(gpu, graph)

    return GraphCall(replay, gpu.wait, jax.tree.leaves(results)[0])


def time_jax_jit(function: Callable[..., Any], arguments: list[Any]) -> tuple[float, Any]:
    """Return the seconds of a call of ``jax.jit`` on arrays in GPU memory, and its result."""
    placed = [jax.device_put(a) for a in arguments]
    jitted = jax.jit(function)
    last: list[Any] = []

    def run() -> None:
        last[:] = [jitted(*placed)]

    return back_to_back(run, lambda: last[0].block_until_ready()), last[0]


def bundles_of(
    names: list[str], compiled: Callable[[str], bytes], write: Path | None, read: Path | None
) -> dict[str, bytes]:
    """Return the bundle of each case, compiled or read; with ``write`` only write them to that folder.

    A case that does not compile is omitted with a note on standard error.
    """
    found = {}
    for name in names:
        path = (write or read or Path()) / ("".join(c if c.isalnum() else "_" for c in name) + ".vmfb")
        found[name] = path.read_bytes() if read else compiled(name)
        if write:
            write.mkdir(parents=True, exist_ok=True)
            path.write_bytes(found[name])
    return found
