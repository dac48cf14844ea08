"""Simulated steps of Llama 70B layers on 8 to 512 GPUs.

A simulation: no GPU runs. The functions are partitioned and compiled for the target with two numbers of layers. Times
of kernels are those of aotc's cost model, times of collectives NCCL's own estimates: docs/sharding.md has the formulas.
Both runs of layers give the time of a layer, and all 80 layers are extrapolated from it. Embeddings, the output layer,
memory and the host are not part of it.

``sequential`` is the time of a step that runs one command at a time, ``overlapped`` that of one with kernels beside
collectives. ``share`` is that of the collectives in the former, ``exposed`` the part of the latter in which no kernel
runs. ``efficiency`` is the time of one GPU with enough memory for the same tokens, divided by the time of the step and
the number of GPUs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, NamedTuple

import typer

import aotc
from aotc.tools.explain.step import explain_step
from aotc.tools.simulate.cluster import FORMULAS, PROTOCOLS, RankCluster, cluster_of
from aotc.vmfb.bundle import open_bundle
from benchmarks import options, report, timing
from benchmarks.programs import llama

LAYERS, FEW = 80, (2, 4)
HOST = 8
"""GPUs of a host, which is also the size of a tensor-parallel group."""
ROWS, STAGES, MICROBATCHES = 2048, 8, 32
SMALL = llama.Sizes(64, 16, 8, 8, 128)

Inside = Annotated[str, typer.Option(help="Link inside a host: nvlink or pcie.")]
Between = Annotated[str, typer.Option(help="Link between hosts: ib or ethernet.")]


class Times(NamedTuple):
    """Seconds of a step without and with overlap, of its kernels and of its collectives; a vector over runs."""

    sequential: float
    overlapped: float
    kernels: float
    collectives: float

    def combined(self, other: Times, operation: Callable[[float, float], float]) -> Times:
        """Return the numbers of both combined one by one."""
        return Times(*map(operation, self, other))

    def scaled(self, factor: float) -> Times:
        """Return the times of ``factor`` such steps one after the other."""
        return Times(*(factor * x for x in self))


class Bench(NamedTuple):
    """Parameters of all cases: the sizes of a layer, the target and the cluster."""

    sizes: llama.Sizes
    target: str
    cluster: RankCluster

    def times(self, make: Callable[[llama.Sizes, int], llama.Case], layers: int, mesh: Mapping[str, int]) -> Times:
        """Return the simulated times of ``layers`` layers, from those of a few."""
        few, more = (self._simulated(make(self.sizes, count), mesh) for count in FEW)
        one = more.combined(few, operator.sub).scaled(1 / (FEW[1] - FEW[0]))
        return few.combined(one.scaled(layers - FEW[0]), operator.add)

    def _simulated(self, case: llama.Case, mesh: Mapping[str, int]) -> Times:
        """Compile a function and simulate a call of it; without a mesh on one device."""
        cut = {"mesh": mesh, "in_shardings": case.shardings, "out_shardings": case.results} if mesh else {}
        bundle = aotc.compile(case.function, *case.arguments, target=self.target, **cut)
        found = explain_step(open_bundle(bundle), self.cluster)
        runs = found.sequential, found.overlapped
        return Times(*(run.seconds for run in runs), runs[0].kernels, runs[0].collectives)


class Layout(NamedTuple):
    """A way to cut a model, and its tokens, over GPUs.

    Attributes
    ----------
    sharded : callable
        Returns the times of a step on a number of GPUs.
    alone : callable
        Returns the seconds of one GPU for the tokens of a replica, and those of the update once a step.
    replica : int
        GPUs of a replica.
    text : str
        The layout, with the number of replicas as ``{n}``.
    """

    sharded: Callable[[Bench, int], Times]
    alone: Callable[[Bench], tuple[float, float]]
    replica: int
    text: str


Make = Callable[[llama.Sizes, int, int, int], llama.Case]


def on_hosts(case: Make, batch: int, updates: bool = False) -> Layout:
    """Return tensor parallelism inside hosts, and data parallelism over them."""

    def sharded(bench: Bench, gpus: int) -> Times:
        replicas = gpus // HOST
        mesh = {"data": replicas, "model": HOST}
        return bench.times(lambda s, layers: case(s, layers, batch * replicas, ROWS), LAYERS, mesh)

    return Layout(sharded, partial(_alone, case, batch, updates), HOST, f"TP={HOST} x DP={{n}}")


def _alone(case: Make, batch: int, updates: bool, bench: Bench) -> tuple[float, float]:
    """Return the seconds of one GPU for ``batch`` sequences without the update, and those of the update."""
    whole = bench.times(lambda s, layers: case(s, layers, batch, ROWS), LAYERS, {}).sequential
    update = bench.times(llama.adam_case, LAYERS, {}).sequential if updates else 0.0
    return whole - update, update


def fully_sharded(bench: Bench, gpus: int) -> Times:
    """Return the times of a training step with all weights cut over all GPUs."""
    return bench.times(lambda s, layers: llama.fsdp_case(s, layers, 2 * gpus, ROWS), LAYERS, {"data": gpus})


def pipeline(bench: Bench, gpus: int) -> Times:
    """Return the times of a training step in stages, a host each.

    Each stage has two functions: forward and backward of a microbatch, and the update once a step. A step takes
    ``microbatches + stages - 1`` microbatches (Narayanan et al., "Efficient large-scale language model training on GPU
    clusters using Megatron-LM", 2021). Each rank sends its activations to the next stage, and their gradients back;
    with overlap only those of the first microbatch are waited for.
    """
    replicas, layers = gpus // HOST // STAGES, LAYERS // STAGES
    micro = bench.times(_microbatch, layers, {"model": HOST})
    mesh = {"data": replicas, "model": HOST}
    update = bench.times(lambda s, count: llama.update_case(s, count, replicas), layers, mesh)
    hop = 2 * bench.cluster.permute_time(2 * ROWS * bench.sizes.d, 0, HOST).seconds
    count = MICROBATCHES + STAGES - 1
    whole = micro.scaled(count)
    busy = micro.scaled(MICROBATCHES)
    return Times(
        whole.sequential + count * hop + update.sequential,
        whole.overlapped + (STAGES - 1) * hop + update.overlapped,
        busy.kernels + update.kernels,
        busy.collectives + MICROBATCHES * hop + update.collectives,
    )


def _pipeline_alone(bench: Bench) -> tuple[float, float]:
    micro = bench.times(_microbatch, LAYERS, {}).sequential
    return micro * MICROBATCHES, bench.times(llama.adam_case, LAYERS, {}).sequential


def _microbatch(s: llama.Sizes, layers: int) -> llama.Case:
    return llama.stage_case(s, layers, 1, ROWS)


LAYOUTS = {
    "prefill, 1 x 2048 tokens a host": on_hosts(llama.prefill_case, 1),
    "decode, 16 sequences of 2048 a host": on_hosts(llama.decode_case, 16),
    "training, 4 x 2048 tokens a host": on_hosts(llama.train_case, 4, True),
    "training, 2 x 2048 tokens a GPU": Layout(
        fully_sharded, partial(_alone, llama.fsdp_case, 2, True), 1, "FSDP={n}"
    ),
    "training, 32 x 2048 tokens a pipeline": Layout(
        pipeline, _pipeline_alone, HOST * STAGES, f"TP={HOST} x PP={STAGES} x DP={{n}}"
    ),
}  # fmt: skip


def run(
    only: options.Only = "", target: options.Target = "cuda:sm_90a", inside: Inside = "nvlink", between: Between = "ib"
) -> None:
    """Print a row for each way to cut the model and each number of GPUs, and the figures behind the times."""
    cluster = cluster_of(inside, between, HOST)
    bench = Bench(SMALL if timing.SMOKE else llama.Sizes(), "cpu" if timing.SMOKE else target, cluster)
    columns = (
        report.Column("layout", width=14), report.ms("sequential"), report.ms("overlapped"), report.ms("kernels"),
        report.ms("collectives"), report.Column("share %", 100), report.Column("exposed %", 100),
        report.Column("efficiency"), report.Column("overlapped efficiency"),
    )  # fmt: skip
    table = report.Table("case, GPUs", *columns, title="Simulated steps of 80 layers")
    for name in options.select(LAYOUTS, only):
        layout = LAYOUTS[name]
        one, update = layout.alone(bench)
        for gpus in (max(HOST, layout.replica),) if timing.SMOKE else (8, 64, 512):
            if gpus < layout.replica:
                continue
            replicas = gpus // layout.replica
            times = layout.sharded(bench, gpus)
            shares = times.collectives / times.sequential, 1 - times.kernels / times.overlapped
            ideal = (one * replicas + update) / gpus
            efficiencies = ideal / times.sequential, ideal / times.overlapped
            table.add(f"{name}, {gpus}", layout.text.format(n=replicas), *times, *shares, *efficiencies)
    _report_figures(cluster)


def _report_figures(cluster: RankCluster) -> None:
    """Print the figures of the links, the protocols and the formulas."""
    links = report.Table("link", report.Column("GB/s a rank", 1e-9), "source", title="Links")
    for link in (cluster.inside, cluster.between):
        links.add(link.name, link.bandwidth, link.source)
    names = ("ring", "tree")
    columns = [f"{name} {kind} us" for kind in ("base", "nvlink", "pcie", "network") for name in names]
    protocols = report.Table("protocol", *columns, title="Latencies of a call (base) and of a hop")
    for protocol in PROTOCOLS:
        pairs = (protocol.base, protocol.nvlink, protocol.pcie, protocol.network)
        protocols.add(protocol.name, *(float(x) for pair in pairs for x in pair))
    report.note("a simulation: no GPU ran; the error of the cost model is that of `python -m benchmarks costs`")
    report.note(f"layers {FEW[0]} and {FEW[1]} are compiled, {LAYERS} are extrapolated")
    report.note("protocols, their shares of the bandwidth and corrections: NCCL 2.30, src/graph/tuning.cc")
    for text in FORMULAS:
        report.note(text)
