"""Products of matrices on a GPU beside jax.jit and cuBLASLt: benchmarks/products.py [--only PATTERN] [--tiles PATTERN].

All three in one run on the same sizes: the time of a call on arrays that lie on the GPU, back to back, in us, with
TFLOP/s; percent is of cuBLASLt, through torch. ``--tiles`` times every tiling of the table, for the cost model.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import time
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import aotc
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.kernels.cuda.image import unpacked
from aotc.kernels.cuda.templates.gemm.launch import launch_entry, tiles_of
from aotc.kernels.jobs.objects import Named, compile_texts, kernel_requests
from aotc.lowering.plans.gpu_matmul_tiles import TILE_RATES, nanoseconds, templates_of
from aotc.options import Options
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.devices.cuda.launch import LaunchShape, launch_of
from aotc.vmfb.devices.cuda.tensor_map import encode_map
from aotc.vmfb.dtypes import to_numpy

TARGET = "cuda:sm_90a"
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "i8": np.int8, "f32": np.float32}
KINDS |= {"f64": np.float64, "f8": ml_dtypes.float8_e4m3fn}


def matmul(a, b):
    return a @ b


def matmul_nt(a, b):
    return a @ b.T


def dense(a, b, bias):
    return jax.nn.gelu(a @ b + bias)


def residual(a, b, bias, x):
    return x + (a @ b + bias)


def integers(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)


def short(a, b):
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def scores(a, b):
    return jnp.einsum("bqhd,bkhd->bhqk", a, b)


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def by_twos(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def of_kernel(step, x, w, g):
    """Return the gradient of a convolution's kernel, given that of its result."""
    lies = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return jax.vjp(lambda w: jax.lax.conv_general_dilated(x, w, (step, step), "SAME", **lies), w)[1](g)[0]


kernel_gradient, kernel_gradient_by_twos = partial(of_kernel, 1), partial(of_kernel, 2)


def highest(a, b):
    return jnp.dot(a, b, precision="highest")


# Function, dtype, shapes of the operands, floating-point operations.
CASES = {
    "4096^3 bf16": (matmul, "bf16", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 f16": (matmul, "f16", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 bf16 gelu": (dense, "bf16", [(4096, 4096), (4096, 4096), (4096,)], 2 * 4096**3),
    "4096^3 tf32": (matmul, "tf32", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 tf32 NT": (matmul_nt, "tf32", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "4096^3 i8 NT": (integers, "i8", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "64x64x65536 bf16": (matmul, "bf16", [(64, 65536), (65536, 64)], 2 * 64 * 64 * 65536),
    "8x4096x16384 bf16": (matmul, "bf16", [(8, 16384), (16384, 4096)], 2 * 8 * 4096 * 16384),
    "1x4096x4096 bf16": (matmul, "bf16", [(1, 4096), (4096, 4096)], 2 * 4096 * 4096),
    "16x4096x4096 bf16": (matmul, "bf16", [(16, 4096), (4096, 4096)], 2 * 16 * 4096 * 4096),
    "1x768x3072 bf16": (matmul, "bf16", [(1, 768), (768, 3072)], 2 * 768 * 3072),
    "128x3072x768 bf16 gelu": (dense, "bf16", [(128, 768), (768, 3072), (3072,)], 2 * 128 * 3072 * 768),
    "128x768x3072 bf16": (matmul, "bf16", [(128, 3072), (3072, 768)], 2 * 128 * 3072 * 768),
    "1024x768x768 bf16 residual": (
        residual, "bf16", [(1024, 768), (768, 768), (768,), (1024, 768)], 2 * 1024 * 768 * 768
    ),
    "1024x3072x768 bf16 gelu": (dense, "bf16", [(1024, 768), (768, 3072), (3072,)], 2 * 1024 * 3072 * 768),
    "1024x768x3072 bf16": (matmul, "bf16", [(1024, 3072), (3072, 768)], 2 * 1024 * 3072 * 768),
    "8192x3072x768 bf16 gelu": (dense, "bf16", [(8192, 768), (768, 3072), (3072,)], 2 * 8192 * 3072 * 768),
    "8192x768x3072 bf16": (matmul, "bf16", [(8192, 3072), (3072, 768)], 2 * 8192 * 3072 * 768),
    "8192x768x3072 bf16 residual": (
        residual, "bf16", [(8192, 3072), (3072, 768), (768,), (8192, 768)], 2 * 8192 * 768 * 3072
    ),
    "1024x768x3072 tf32 residual": (
        residual, "tf32", [(1024, 3072), (3072, 768), (768,), (1024, 768)], 2 * 1024 * 768 * 3072
    ),
    "1024x3072x768 tf32": (matmul, "tf32", [(1024, 768), (768, 3072)], 2 * 1024 * 3072 * 768),
    "8x12x1024x64 bf16 scores": (scores, "bf16", [(8, 1024, 12, 64), (8, 1024, 12, 64)], 2 * 96 * 1024 * 1024 * 64),
    "1000x1001x999 bf16 odd": (matmul, "bf16", [(1000, 999), (999, 1001)], 2 * 1000 * 1001 * 999),
    "conv 16x56x56x64 3x3 bf16": (
        convolution, "bf16", [(16, 56, 56, 64), (3, 3, 64, 64)], 2 * 16 * 56 * 56 * 64 * 9 * 64
    ),
    "conv 16x14x14x256 3x3 tf32": (
        convolution, "tf32", [(16, 14, 14, 256), (3, 3, 256, 256)], 2 * 16 * 14 * 14 * 256 * 9 * 256
    ),
    "4096^3 f8 NT": (short, "f8", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "1024x3072x768 f8 NT": (short, "f8", [(1024, 768), (3072, 768)], 2 * 1024 * 3072 * 768),
    "2048^3 f64": (matmul, "f64", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
    "4096^3 f64": (matmul, "f64", [(4096, 4096), (4096, 4096)], 2 * 4096**3),
    "2048^3 f64 NT": (matmul_nt, "f64", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
    "512^3 f64": (matmul, "f64", [(512, 512), (512, 512)], 2 * 512**3),
    "1000x1001x999 f64 odd": (matmul, "f64", [(1000, 999), (999, 1001)], 2 * 1000 * 1001 * 999),
    "64x64x65536 f64": (matmul, "f64", [(64, 65536), (65536, 64)], 2 * 64 * 64 * 65536),
    "conv 16x14x14x256 3x3 f64": (
        convolution, "f64", [(16, 14, 14, 256), (3, 3, 256, 256)], 2 * 16 * 14 * 14 * 256 * 9 * 256
    ),
    "2048^3 f32 highest": (highest, "f32", [(2048, 2048), (2048, 2048)], 2 * 2048**3),
}  # fmt: skip


# Of ResNet-50: image, channels, taps, results, pixels' step.
LAYERS = [
    (224, 3, 7, 64, 2), (56, 64, 1, 256, 1), (56, 64, 3, 64, 1), (56, 128, 3, 128, 2), (56, 256, 1, 512, 2),
    (28, 512, 1, 128, 1), (28, 128, 3, 128, 1), (14, 256, 1, 1024, 1), (14, 256, 3, 256, 1), (7, 512, 1, 2048, 1),
    (7, 512, 3, 512, 1),
]  # fmt: skip
for _images in (1, 16):
    for _size, _c, _taps, _n, _step in LAYERS:
        for _kind in ("bf16", "tf32"):
            CASES[f"resnet b{_images} {_size}x{_size}x{_c} {_taps}x{_taps}/{_step} {_n} {_kind}"] = (
                by_twos if _step == 2 else convolution, _kind,
                [(_images, _size, _size, _c), (_taps, _taps, _c, _n)],
                2 * _images * (_size // _step) ** 2 * _taps**2 * _c * _n,
            )  # fmt: skip

# Gradients of kernels, of 16 images: image, channels, taps, results, pixels' step.
GRADIENTS = [
    (56, 64, 3, 64, 1), (28, 128, 3, 128, 1), (14, 256, 3, 256, 1), (28, 128, 3, 128, 2), (7, 512, 3, 512, 1),
    (56, 64, 1, 256, 1),
]  # fmt: skip
for _size, _c, _taps, _n, _step in GRADIENTS:
    for _kind in ("bf16", "tf32"):
        CASES[f"kernel gradient {_size}x{_size}x{_c} {_taps}x{_taps}/{_step} {_n} {_kind}"] = (
            kernel_gradient_by_twos if _step == 2 else kernel_gradient, _kind,
            [(16, _size, _size, _c), (_taps, _taps, _c, _n), (16, _size // _step, _size // _step, _n)],
            2 * 16 * (_size // _step) ** 2 * _taps**2 * _c * _n,
        )  # fmt: skip


def operands_of(kind, shapes):
    """Return operands: the same for all."""
    random = np.random.default_rng(0)
    if kind == "i8":
        return [random.integers(-128, 128, s).astype(np.int8) for s in shapes]
    drawn = np.float64 if kind == "f64" else np.float32
    return [random.standard_normal(s, drawn).astype(KINDS[kind]) for s in shapes]


def per_call(run, wait, seconds=0.02, before=0.2):
    """Return the us of a call among many, without what the first and the wait take.

    Calls run for ``before`` seconds first: large products take a GPU to its limit of power, where its clock depends on
    what ran until then, and each is to be measured by its own.
    """
    end = time.perf_counter() + before
    while time.perf_counter() < end:
        for _ in range(4):
            run()
        wait()
    begin = time.perf_counter()
    run()
    wait()
    count = max(min(int(seconds / max(time.perf_counter() - begin, 1e-6)), 400), 4)

    def timed(calls):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        return time.perf_counter() - start

    return 1e6 * sorted((timed(3 * count) - timed(count)) / (2 * count) for _ in range(5))[2]


def of_aotc(data, arguments):
    """Return the us of the graph of a call, and its results."""
    graphs = []
    run_graph = driver.Gpu.run_graph

    def noted(self, graph):
        graphs.append((self, graph))
        run_graph(self, graph)

    driver.Gpu.run_graph = noted
    try:
        module = aotc.load(data, devices="cuda")
        module.invoke("main", *arguments)
        del graphs[:]
        found = module.invoke("main", *arguments)
    finally:
        driver.Gpu.run_graph = run_graph
    gpu = graphs[0][0]
    us = per_call(lambda: [run_graph(gpu, g) for _, g in graphs], gpu.wait)
    return us, jax.tree.leaves(found)[0]


def of_jax(function, arguments):
    """Return the us of a call of jax.jit, and its result."""
    placed = [jax.device_put(a) for a in arguments]
    jitted = jax.jit(function)
    last = []

    def run():
        last[:] = [jitted(*placed)]

    return per_call(run, lambda: last[0].block_until_ready()), last[0]


def to_torch(a):
    """Return an array as torch has it on the GPU."""
    import torch

    a = np.ascontiguousarray(a)
    named = {ml_dtypes.bfloat16: (np.int16, torch.bfloat16), ml_dtypes.float8_e4m3fn: (np.int8, torch.float8_e4m3fn)}
    bits, kind = named.get(a.dtype.type, (a.dtype, None))
    there = torch.from_numpy(a.view(bits)).cuda()
    return there if kind is None else there.view(kind)


def of_graph(run):
    """Return the us of a replay of torch's graph of what ``run`` does."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return per_call(graph.replay, torch.cuda.synchronize)


def of_torch(function, kind, arguments):
    """Return the us of a replay of torch's graph of the product: cuBLASLt's."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    a, b, *rest = map(to_torch, arguments)
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    nchw, one = (a, b), torch.ones((), device="cuda")
    if isinstance(function, partial) or function in (convolution, by_twos):
        nchw = (
            a.permute(0, 3, 1, 2),
            b.permute(3, 2, 0, 1).contiguous(memory_format=torch.channels_last),
            *(g.permute(0, 3, 1, 2) for g in rest),
        )

    def gradient(step):
        around, mask = [nchw[1].shape[2] // 2] * 2, [False, True, False]
        convolved = torch.ops.aten.convolution_backward
        return convolved(nchw[2], *nchw[:2], None, [step] * 2, around, [1, 1], False, [0, 0], 1, mask)[1]

    run = {
        matmul: lambda: a @ b,
        highest: lambda: a @ b,
        matmul_nt: lambda: a @ b.T,
        short: lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        integers: lambda: torch._int_mm(a, b.T),
        dense: lambda: torch._addmm_activation(rest[0], a, b, use_gelu=True),
        residual: lambda: torch.addmm(rest[1], a, b),
        by_twos: lambda: torch.nn.functional.conv2d(nchw[0], nchw[1], stride=2, padding=nchw[1].shape[2] // 2),
        convolution: lambda: torch.nn.functional.conv2d(nchw[0], nchw[1], padding="same"),
        kernel_gradient: lambda: gradient(1),
        kernel_gradient_by_twos: lambda: gradient(2),
        scores: lambda: torch.matmul(a.transpose(1, 2), b.permute(0, 2, 3, 1)),
    }[function]
    return of_graph(run)


def error_of(found, want):
    """Return the relative error against JAX's result."""
    a, b = (np.asarray(x).astype("f8") for x in (found, want))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30))


def of_tiles(data):
    """Yield every tiling of the first product of a bundle: its name, us, and what the model says.

    Operands are random: a GPU that multiplies zeros takes less power, and its clock stays higher.
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
    named = [Named(print_kernel(k), target) for k in made]
    compiled = map(unpacked, compile_texts(kernel_requests(named), named, Options()))
    gpu = driver.Gpu(0)
    places = [gpu.allocate(int(np.prod([evaluate(d, {}) for d in b.shape])) * 8 + 1024)
              for b in (*kernel.inputs, *kernel.outputs)]  # fmt: skip
    for place, b in zip(places, kernel.inputs):
        shape = [evaluate(d, {}) for d in b.shape]
        x = (20 * np.random.default_rng(0).standard_normal(shape, np.float32)).astype(to_numpy(b.dtype))
        gpu.upload(place, x.ctypes.data, x.nbytes)
        gpu.wait()
    for row, k, image in zip(rows, made, compiled):
        entry = {"name": k.name, "threads": tiles_of(k).threads, "launch": launch_entry(k)}
        function = gpu.function(gpu.load(image.data), k.name)
        gpu.let_share(function, entry["launch"]["shared"])
        shape: LaunchShape = launch_of("benchmark", entry, (), 1, gpu.multiprocessors)
        maps = [encode_map("benchmark", m, places[m["buffer"]], ()) for m in entry["launch"]["maps"]]
        values = (ctypes.c_int64 * (len(places) + 1))(*places, 1)
        table = [*map(ctypes.addressof, maps), *(ctypes.addressof(values) + 8 * n for n in range(len(values)))]
        pointers = (ctypes.c_void_p * len(table))(*table)
        us = per_call(partial(gpu.launch, function, shape, pointers), gpu.wait)
        yield str(row.tiling), us, nanoseconds(product, row, window) / 1000
    gpu.free(places)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--tiles", default="")
    options = parser.parse_args()
    names = [name for name in CASES if re.search(options.only, name)]
    given = {name: operands_of(CASES[name][1], CASES[name][2]) for name in names}

    def build(name):
        with jax.enable_x64(CASES[name][1] == "f64"):
            shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in given[name]]
            return aotc.compile(jax.jit(CASES[name][0]), *shapes, target=TARGET)

    bundles = {name: build(name) for name in names}
    print(f"{'':28}   aotc us  TFLOP/s    jax us  torch us  percent     error", flush=True)
    for name in names:
        function, kind, _, flops = CASES[name]
        us, found = of_aotc(bundles[name], given[name])
        with jax.enable_x64(kind == "f64"):
            jax_us, want = of_jax(function, given[name])
        torch_us = of_torch(function, kind, given[name])
        row = f"{name:28} {us:9.2f} {flops / us / 1e6:8.1f} {jax_us:9.2f} {torch_us:9.2f} {100 * torch_us / us:8.1f}"
        print(f"{row} {error_of(found, want):9.1e}", flush=True)
        if options.tiles and re.search(options.tiles, name):
            for tiling, us, model in of_tiles(bundles[name]):
                print(f"    {tiling:24} {us:9.2f} us, model {model:9.2f}", flush=True)


if __name__ == "__main__":
    main()
