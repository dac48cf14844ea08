"""Attention of few queries, by tiling.

All tilings run on the same arrays: the time of the kernel alone, in graphs of ten launches, TB/s of keys and values
that it reads, and its error, next to torch's ``scaled_dot_product_attention``. The keys of a head are split into
``parts`` that another kernel would combine; its time is not included. ``--resources`` only prints the resources of
each kernel, which needs no GPU.
"""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Annotated, Any

import typer

from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.compile import compile_kernel
from aotc.kernels.cuda.templates.launches import template_launch
from aotc.targets import TARGETS
from benchmarks import children, options, report
from benchmarks.gpu.graphs import need_gpu
from benchmarks.peers.torch_gpu import installed, time_torch_graph

sys.path.insert(0, str(children.ROOT / "tests"))  # its texts of attention kernels


def mma(rows: int, terms: int, stages: int) -> Tiling:
    """Return the tiling in which each warp has its own queries."""
    return Tiling(MmaAttention(), rows, terms, stages)


def decode(rows: int, terms: int, stages: int, cluster: int = 1) -> Tiling:
    """Return the tiling in which warps split the keys of the same queries."""
    return Tiling(DecodeAttention(cluster), rows, terms, stages)


def label(tiling: Tiling) -> str:
    """Describe a tiling in a few words."""
    match tiling.template:
        case DecodeAttention(cluster):
            kind = f"decode of {cluster}"
        case _:
            kind = "warps"
    return f"{kind} {tiling.rows} x {tiling.cols} x {tiling.stages}"


GROUPS = {"q": "z, row, d", "k": "z, term, d", "v": "z, term, col", "o": "z, row, col"}
# dtype, heads of keys, queries of each, terms, elements: tilings, and how many parts with each.
CASES: dict[tuple[str, int, int, int, int], list[tuple[Tiling, int]]] = {
    ("bf16", 8, 4, 32768, 128): [
        (mma(16, 32, 3), 64), (decode(128, 16, 3), 16), (decode(128, 16, 2), 16),
        (decode(64, 32, 3), 16), (decode(64, 16, 3), 32), (decode(64, 16, 6), 16),
        (decode(32, 32, 3), 32), (decode(128, 16, 3, 8), 2),
        (decode(128, 16, 3, 4), 4), (decode(128, 16, 3, 2), 8),
        (decode(64, 16, 3, 8), 4), (decode(128, 16, 3, 8), 1),
        (decode(128, 16, 3, 6), 1), (decode(128, 16, 3, 4), 1),
        (decode(128, 16, 3, 2), 1), (decode(128, 16, 3, 2), 4),
    ],
    ("bf16", 64, 4, 8192, 128): [
        (mma(16, 32, 3), 8), (decode(128, 16, 3, 2), 1), (decode(128, 16, 3), 2),
        (decode(128, 16, 3), 1), (decode(64, 16, 3, 4), 1),
        (decode(64, 16, 6, 2), 1), (decode(64, 32, 3, 2), 1),
    ],
    ("bf16", 128, 1, 4096, 64): [
        (mma(16, 64, 3), 4), (decode(128, 32, 3), 1), (decode(64, 32, 3, 2), 1),
        (decode(128, 16, 3, 2), 1), (decode(256, 16, 3), 1), (decode(64, 64, 3), 1),
    ],
    ("f32", 128, 1, 8192, 64): [
        (mma(16, 32, 3), 4), (decode(128, 16, 3), 1), (decode(64, 16, 3, 2), 1),
        (decode(64, 16, 6), 1), (decode(64, 32, 3), 1),
    ],
    ("f32", 12, 1, 1024, 64): [
        (mma(16, 32, 3), 16), (decode(128, 16, 3, 8), 1),
        (decode(128, 16, 1, 8), 1), (decode(64, 16, 2, 8), 1),
        (decode(64, 16, 3, 4), 1), (decode(32, 16, 3, 8), 1),
    ],
    ("bf16", 8, 4, 4096, 128): [
        (decode(128, 16, 3, 8), 1), (decode(128, 16, 3, 4), 4),
        (decode(128, 16, 3, 5), 1), (decode(128, 16, 3, 4), 1),
        (decode(64, 16, 3, 8), 2), (decode(128, 16, 3), 16),
    ],
    ("f32", 32, 1, 2048, 128): [
        (mma(16, 16, 3), 8), (decode(64, 16, 3, 4), 1), (decode(64, 16, 3), 4),
        (decode(64, 16, 3, 2), 1),
    ],
    ("f32", 32, 1, 2048, 256): [
        (mma(16, 16, 3), 8), (decode(32, 16, 3, 4), 1), (decode(32, 16, 3), 4),
        (decode(32, 16, 3, 2), 1), (decode(64, 16, 1), 4),
    ],
}  # fmt: skip
LAUNCHES = 10  # of a graph: what a replay takes besides is shared by them


def compile_attention_kernel(form: tuple[tuple[str, int, int, int, int], Tiling, int]) -> tuple[Any, str, Any]:
    """Compile a kernel; return its image, its symbol, and its launch parameters."""
    from gpu.attention import PLAIN, attention_text

    (dtype, heads, rows, terms, depth), tiling, parts = form
    sizes = heads * parts, rows, terms // parts, depth, depth
    text = attention_text(tiling, sizes, dtype, None, GROUPS, None, PLAIN, depth**-0.5)
    kernel = parse_kernel(text)
    return compile_kernel(kernel, TARGETS["cuda:sm_90a"]), kernel.name, template_launch(kernel)


class AttentionArrays:
    """Queries, keys and values on the GPU, the same for all tilings of a case."""

    def __init__(self, case: tuple[str, int, int, int, int]) -> None:
        import torch

        kind, heads, rows, terms, depth = case
        self.torch, self.case = torch, case
        dtype = {"bf16": torch.bfloat16, "f32": torch.float32}[kind]
        shapes = (heads, rows, depth), (heads, terms, depth), (heads, terms, depth)
        self.q, self.k, self.v = (torch.randn(s, device="cuda", dtype=torch.float32).to(dtype) for s in shapes)

    def split(self, parts: int) -> list[Any]:
        """Return the operands of a kernel with ``parts`` parts, and memory for its result."""
        _, heads, _, terms, depth = self.case
        q = self.q.repeat_interleave(parts, 0).contiguous()
        keys = [x.view(heads * parts, terms // parts, depth) for x in (self.k, self.v)]
        return [q, *keys, self.torch.zeros_like(q)]

    def error(self, arrays: list[Any]) -> float:
        """Return the relative error of the last head against f64."""
        q, k, v, found = (x[-1].double() for x in arrays)
        want = self.torch.softmax(q @ k.T * q.shape[-1] ** -0.5, -1) @ v
        return ((found - want).norm() / want.norm()).item()

    def of_torch(self) -> float:
        """Return the seconds of torch's attention: queries with the same keys are the heads of a group."""
        _, heads, rows, _, depth = self.case
        q, k, v = self.q.view(1, heads * rows, 1, depth), self.k[None], self.v[None]
        attend = self.torch.nn.functional.scaled_dot_product_attention
        return time_torch_graph(lambda: attend(q, k, v, enable_gqa=rows > 1))


def measure(made: tuple[Any, str, Any], arrays: list[Any], torch: Any) -> float:
    """Return the seconds of a launch of the kernel ``made``; its result is the last of ``arrays``."""
    from aotc.vmfb.devices.cuda.driver import Gpu, call
    from aotc.vmfb.devices.cuda.launch import launch_of
    from aotc.vmfb.devices.cuda.tensor_map import encode_tensor_map

    image, name, (threads, launch) = made
    gpu = Gpu(0)
    function = gpu.kernel_handle(gpu.load_module(image.data), name)
    gpu.allow_dynamic_shared_memory(function, launch["shared"])
    entry = {"name": name, "threads": threads, "items": 1, "launch": launch}
    shape = launch_of("benchmark", entry, (), 1, gpu.multiprocessors)
    places = [a.data_ptr() for a in arrays]
    maps = [encode_tensor_map("benchmark", m, places[m["buffer"]], ()) for m in launch["maps"]]
    values = (ctypes.c_int64 * (len(places) + 1))(*places, 1)
    start = ctypes.addressof(values)
    given = [*map(ctypes.addressof, maps), *(start + 8 * n for n in range(len(values)))]
    table = (ctypes.c_void_p * len(given))(*given)

    def run() -> None:
        config = shape.config(ctypes.c_void_p(torch.cuda.current_stream().cuda_stream or None))
        for _ in range(LAUNCHES):
            call("cuLaunchKernelEx", ctypes.byref(config), function, table, None)

    return time_torch_graph(run) / LAUNCHES


def run(
    only: options.Only = "",
    resources: Annotated[bool, typer.Option("--resources", help="Only registers, spills and shared memory.")] = False,
) -> None:
    """Print a row for each tiling of each case."""
    if not resources:
        need_gpu()
    torch = not resources and installed()
    names = {"{} {}x{} of {} x {}".format(*case): case for case in CASES}
    rows = [(case, *form) for case in map(names.get, options.select(names, only)) for form in CASES[case]]
    with ProcessPoolExecutor() as pool:
        built = list(pool.map(compile_attention_kernel, rows))
    columns = ["registers", "spills", "shared B", report.us("kernel"), report.Column("TB/s", 1e-12), "error"]
    table = report.Table("case, tiling, parts", *columns)
    arrays: AttentionArrays | None = None
    for (case, tiling, parts), kernel in zip(rows, built):
        title = "{} {}x{} of {} x {}".format(*case)
        uses = [kernel[0].resources[x] for x in ("registers", "spills")] + [kernel[2][1]["shared"]]
        measured: list[float | None] = [None, None, None]
        if torch:
            if arrays is None or arrays.case != case:
                arrays = AttentionArrays(case)
                table.add(f"{title}, torch", None, None, None, arrays.of_torch(), None, None)
            operands = arrays.split(parts)
            took = measure(kernel, operands, arrays.torch)
            measured = [took, 2 * arrays.k.nbytes / took, arrays.error(operands)]
        table.add(f"{title}, {label(tiling)}, {parts}", *uses, *measured)
