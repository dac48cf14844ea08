"""Matmuls and convolutions next to cuBLASLt and jax.jit.

All engines run in one process on the same sizes: the time of a call on arrays in GPU memory, back to back;
percentages are relative to cuBLASLt or cuDNN, through torch. ``--tiles`` also times every tiling of the table, for
the cost model.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import jax
import numpy as np
import typer

import aotc
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.kernels.cuda.image import unpack_image
from aotc.kernels.cuda.templates.gemm.launch import gemm_launch, gemm_tiles
from aotc.kernels.jobs.objects import NamedKernels, compile_texts, kernel_requests
from aotc.lowering.plans.gpu_matmul_tiles import TILE_RATES, matmul_nanoseconds, templates_of
from aotc.options import Options
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda.launch import LaunchShape, launch_of
from aotc.vmfb.devices.cuda.tensor_map import encode_tensor_map
from aotc.vmfb.dtypes import to_numpy
from benchmarks import options, report
from benchmarks.gpu import product_cases as of
from benchmarks.gpu.graphs import bundles_of, graph_of, need_gpu, time_jax_jit
from benchmarks.peers.torch_gpu import installed, time_torch_graph, to_torch
from benchmarks.timing import back_to_back

TARGET = "cuda:sm_90a"


def torch_seconds(function: Any, kind: str, arguments: list[Any]) -> float:
    """Return the seconds of a replay of torch's graph of the matmul or convolution: cuBLASLt's or cuDNN's time."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    a, b, *rest = map(to_torch, arguments)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    nchw, one = (a, b), torch.ones((), device="cuda")
    if isinstance(function, partial) or function in (of.convolution, of.by_twos):
        nchw = (
            a.permute(0, 3, 1, 2),
            b.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last),
            *(g.permute(0, 3, 1, 2) for g in rest),
        )

    def gradient(step: int) -> Any:
        around, mask = [nchw[1].shape[2] // 2] * 2, [False, True, False]
        convolved = torch.ops.aten.convolution_backward
        return convolved(nchw[2], *nchw[:2], None, [step] * 2, around, [1, 1], False, [0, 0], 1, mask)[1]

    run = {
        of.matmul: lambda: a @ b,
        of.highest: lambda: a @ b,
        of.matmul_nt: lambda: a @ b.T,
        of.short: lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        of.integers: lambda: torch._int_mm(a, b.T),
        of.dense: lambda: torch._addmm_activation(rest[0], a, b, use_gelu=True),
        of.residual: lambda: torch.addmm(rest[1], a, b),
        of.by_twos: lambda: torch.nn.functional.conv2d(nchw[0], nchw[1], stride=2, padding=nchw[1].shape[2] // 2),
        of.convolution: lambda: torch.nn.functional.conv2d(nchw[0], nchw[1], padding="same"),
        of.kernel_gradient: lambda: gradient(1),
        of.kernel_gradient_by_twos: lambda: gradient(2),
        of.scores: lambda: torch.matmul(a.transpose(1, 2), b.permute(0, 2, 3, 1)),
    }[function]
    return time_torch_graph(run)


def relative_error(got: Any, want: Any) -> float:
    """Return the error relative to JAX's result."""
    a, b = (np.asarray(x).astype("f8") for x in (got, want))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def time_tilings(data: bytes) -> Iterator[tuple[str, float, float]]:
    """Yield every tiling of the first matmul of a bundle: its name, its seconds, and the predicted seconds.

    Operands are random: a GPU that multiplies zeros uses less power, so its clock is faster.
    """
    texts = [k["text"] for k in open_bundle(data).manifest["debug"]["kernels"].values()]
    kernel = next((k for k in map(parse_kernel, texts) if k.tiling is not None), None)
    if kernel is None:
        return
    target, product = TARGETS[TARGET], read_product(kernel)
    window = kernel.tiling.window
    templates = templates_of(product, target, window)
    rows = [row for row in TILE_RATES if row.tiling.template in templates]
    made = [replace(kernel, tiling=replace(row.tiling, window=window)) for row in rows]
    named = [NamedKernels(print_kernel(k), target) for k in made]
    images = map(unpack_image, compile_texts(kernel_requests(named), named, Options()))
    gpu = driver.Gpu(0)
    places = [gpu.allocate(int(np.prod([evaluate(d, {}) for d in b.shape])) * 8 + 1024)
              for b in (*kernel.inputs, *kernel.outputs)]  # fmt: skip
    for place, b in zip(places, kernel.inputs):
        shape = [evaluate(d, {}) for d in b.shape]
        x = (20 * np.random.default_rng(0).standard_normal(shape, np.float32)).astype(to_numpy(b.dtype))
        gpu.upload(place, x.ctypes.data, x.nbytes)
        gpu.wait()
    for row, k, image in zip(rows, made, images):
        entry = {"name": k.name, "threads": gemm_tiles(k).threads, "launch": gemm_launch(k)}
        function = gpu.kernel_handle(gpu.load_module(image.data), k.name)
        gpu.allow_dynamic_shared_memory(function, entry["launch"]["shared"])
        shape: LaunchShape = launch_of("benchmark", entry, (), 1, gpu.multiprocessors)
        maps = [encode_tensor_map("benchmark", m, places[m["buffer"]], ()) for m in entry["launch"]["maps"]]
        values = (ctypes.c_int64 * (len(places) + 1))(*places, 1)
        table = [*map(ctypes.addressof, maps), *(ctypes.addressof(values) + 8 * n for n in range(len(values)))]
        pointers = (ctypes.c_void_p * len(table))(*table)
        seconds = back_to_back(partial(gpu.launch, function, shape, pointers), gpu.wait)
        yield str(row.tiling), seconds, matmul_nanoseconds(product, row, window) / 1e9
    gpu.free(places)


def compile_case(name: str) -> bytes:
    """Compile the case ``name`` to a bundle."""
    function, kind, shapes, _ = of.CASES[name]
    with jax.enable_x64(kind == "f64"):
        arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in of.operands_of(kind, shapes)]
        return aotc.compile(jax.jit(function), *arguments, target=TARGET)


def run(
    only: options.Only = "",
    tiles: Annotated[str, typer.Option(metavar="PATTERN", help="Cases of which every tiling is timed too.")] = "",
    compile_: options.CompileTo = None,
    bundles: options.Bundles = None,
) -> None:
    """Print a row for each case."""
    data = bundles_of(options.select(of.CASES, only), compile_case, compile_, bundles)
    if compile_:
        return
    need_gpu()
    torch = installed()
    columns = [report.us("aotc"), report.Column("TFLOP/s", 1e-12), report.us("jax"), report.us("torch")]
    table = report.Table("matmul", *columns, "percent", "error")
    for name, bundle in data.items():
        function, kind, shapes, flops = of.CASES[name]
        arguments = of.operands_of(kind, shapes)
        call = graph_of(bundle, arguments)
        ours = call.seconds()
        with jax.enable_x64(kind == "f64"):
            theirs, want = time_jax_jit(function, arguments)
        library = torch_seconds(function, kind, arguments) if torch else None
        percent = 100 * library / ours if library else None
        table.add(name, ours, flops / ours, theirs, library, percent, relative_error(call.result, want))
        if tiles and re.search(tiles, name):
            each = report.Table("tiling", report.us("measured"), report.us("model"), title=name)
            for tiling, seconds, model in time_tilings(bundle):
                each.add(tiling, seconds, model)
