"""Whole programs on a GPU whose memory is NaN wherever a program has written nothing: margins, arena and guards.

Each is compiled with ``guard=True``, so that intermediate arrays have gaps between them, and each allocation of the
driver is filled with NaN and has margins of NaN. What a tensor map or a load reads outside of its operand is NaN then.
"""

import gc
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.poisoned import MARGIN, NAN_BYTE
from support.gpu_program import gpu_program
from vmfb.simulated_gpu import SimulatedGpu, install
from vmfb.test_cuda import gpu

import aotc
from aotc.diagnostics import InternalError
from aotc.ir.loop.forms.tiling import DecodeAttention, Mma, MmaAttention, Template, Wgmma, WgmmaAttention
from aotc.kernels.cuda import build
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.errors import BundleError

BF16, F32 = jnp.bfloat16, jnp.float32
HOPPER, AMPERE = "cuda:sm_90a", "cuda:compute_80"
BOUND = {BF16: 2e-2, F32: 4e-3}
"""Of the relative error that rounding operands, weights and results leaves; f32 is multiplied in TF32."""


def heads_of(x, count):
    return x.reshape(*x.shape[:2], count, x.shape[2] // count)


def cross(x, context, wq, wk, wv, causal=False):
    """Return attention whose operands are results of matmuls: batch and tokens are one dim of each."""
    q, k, v = (heads_of(a @ w, wq.shape[1] // 64) for a, w in ((x, wq), (context, wk), (context, wv)))
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def causal(x, context, *weights):
    return cross(x, context, *weights, causal=True)


def biased(x, context, wq, wk, wv, bias):
    q, k, v = (heads_of(a @ w, wq.shape[1] // 64) for a, w in ((x, wq), (context, wk), (context, wv)))
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def vision(x, w):
    """Return attention of slices of one matmul's result."""
    q, k, v = jnp.split(x @ w, 3, -1)
    return jax.nn.dot_product_attention(*(heads_of(a, w.shape[1] // 192) for a in (q, k, v)))


def cached(x, keys, values, wq):
    """Return attention of one query of each head and slices of a cache."""
    q = heads_of(x @ wq, keys.shape[2])
    return jax.nn.dot_product_attention(q, keys[:, 3:-5], values[:, 3:-5])


def sliced_product(x, w):
    return x[:, 1:-2, 8:-16] @ w[8:-8, 16:-8]


def merged_product(x, w):
    return jnp.einsum("bshd,hde->bhse", heads_of(x, 4), w)


def convolution(x, w):
    return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def rows(x):
    return jax.nn.softmax(x, -1) * x.max(1, keepdims=True) + jnp.cumsum(x, 1)[:, :, ::-1]


def transposed(x):
    return jnp.tanh(x[:, 1:].swapaxes(1, 2)) + x[:, -1, :, None]


@dataclass(frozen=True)
class Program:
    """A function, its arguments' shapes, a template of its kernels if any; symbolic dims by axis of each argument."""

    function: object
    shapes: tuple
    template: Template | None
    dtype: object = BF16
    target: str = HOPPER
    symbolic: dict = field(default_factory=dict)
    batch: int = 1
    """Arguments before this number have the batch in their first axis."""


def projected(batch, rows, terms, width=128, depth=96):
    return (batch, rows, depth), (batch, terms, depth), (depth, width), (depth, width), (depth, width)


WGMMA, FEW, MMA, IN_TURN = WgmmaAttention(), DecodeAttention(), MmaAttention(), Wgmma(ping_pong=True)
BY_SIZES = {0: ("b", "t"), 1: ("b", "s")}
PROGRAMS = {
    "77 keys": Program(cross, projected(2, 256, 77), WGMMA, batch=2),
    "1500 keys": Program(cross, projected(2, 130, 1500), WGMMA, batch=2),
    "197 tokens": Program(vision, ((2, 197, 96), (96, 384)), WGMMA),
    "symbolic": Program(cross, projected(2, 70, 77), WGMMA, symbolic=BY_SIZES, batch=2),
    "symbolic tokens": Program(vision, ((3, 50, 96), (96, 384)), WGMMA, symbolic={0: ("b", "s")}),
    "causal": Program(causal, projected(2, 100, 100), WGMMA, batch=2),
    "bias": Program(biased, (*projected(2, 70, 77), (1, 2, 70, 77)), WGMMA, batch=2),
    "one query": Program(cross, projected(2, 1, 77), FEW, batch=2),
    "one query, symbolic": Program(cross, projected(2, 1, 77), FEW, symbolic={0: ("b",), 1: ("b", "s")}, batch=2),
    "cache": Program(cached, ((2, 1, 96), (2, 70, 2, 64), (2, 70, 2, 64), (96, 128)), FEW, batch=3),
    "f32": Program(cross, projected(2, 100, 77), MMA, F32, batch=2),
    "one query f32": Program(cross, projected(2, 1, 77), FEW, F32, batch=2),
    "warps": Program(cross, projected(2, 100, 77), MMA, target=AMPERE, batch=2),
    "warps, one query": Program(cross, projected(2, 1, 300), MMA, target=AMPERE, batch=2),
    "sliced product": Program(sliced_product, ((2, 80, 96), (88, 96)), IN_TURN),
    "merged product": Program(merged_product, ((2, 70, 256), (4, 64, 72)), IN_TURN),
    "merged product, symbolic": Program(
        merged_product, ((2, 70, 256), (4, 64, 72)), IN_TURN, symbolic={0: ("b", "s")},
    ),
    "sliced product f32": Program(sliced_product, ((2, 80, 96), (88, 96)), Wgmma(transposed=True), F32),
    "odd sizes": Program(jnp.matmul, ((2, 70, 33), (33, 71)), Mma(), F32, AMPERE),
    "sliced product, warps": Program(sliced_product, ((2, 80, 96), (88, 96)), Mma(), target=AMPERE),
    "convolution": Program(convolution, ((2, 9, 9, 64), (3, 3, 64, 72)), IN_TURN),
    "convolution of few channels": Program(convolution, ((2, 16, 16, 3), (7, 7, 3, 32)), IN_TURN),
    "convolution, warps": Program(convolution, ((2, 9, 9, 64), (3, 3, 64, 72)), Mma(), target=AMPERE),
    "rows": Program(rows, ((3, 45, 777),), None, F32),
    "transposed": Program(transposed, ((3, 65, 97),), None),
}  # fmt: skip


def arguments_of(program):
    random = np.random.default_rng(0)
    scale = [1.0 if n < program.batch else shape[-2] ** -0.5 for n, shape in enumerate(program.shapes)]
    return [(random.standard_normal(s) * k).astype(program.dtype) for s, k in zip(program.shapes, scale)]


def model_of(program):
    """Return what is compiled, and the types of its arguments unless it says them."""
    shapes = [jax.ShapeDtypeStruct(s, program.dtype) for s in program.shapes]
    function = jax.jit(program.function)
    if not program.symbolic:
        return function, shapes
    scope = jax.export.SymbolicScope()
    for n, names in program.symbolic.items():
        dims = jax.export.symbolic_shape(",".join(names), scope=scope)
        shapes[n] = jax.ShapeDtypeStruct((*dims, *program.shapes[n][len(dims) :]), program.dtype)
    return jax.export.export(function)(*shapes), []


def compiled(program):
    function, shapes = model_of(program)
    return aotc.compile(function, *shapes, target=program.target, guard=True)


def wanted(program, arguments):
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(jax.jit(program.function)(*(a.astype(F32) for a in arguments)), "f8")


@pytest.fixture
def poison(monkeypatch):
    """Let every allocation of a GPU of a class be full of NaN, and have margins of NaN, from a call with it on."""
    yield partial(_poison, monkeypatch)
    gc.collect()  # what was allocated so is freed so


def _poison(monkeypatch, kind):
    allocate, free, bases = kind.allocate, kind.free, {}

    def poisoned(self, size):
        whole = max(size, 1) + 2 * MARGIN
        base, nans = allocate(self, whole), np.full(whole, NAN_BYTE, np.uint8)
        self.upload(base, nans.ctypes.data, whole)
        self.wait()
        bases[base + MARGIN] = base
        return base + MARGIN

    def freed(self, blocks, graphs=()):
        free(self, [bases.pop(block, block) for block in blocks], graphs)

    monkeypatch.setattr(kind, "allocate", poisoned)
    monkeypatch.setattr(kind, "free", freed)


def check(program, got, want, entries=slice(None)):
    got, want = np.asarray(got).astype("f8")[entries], want[entries]
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= BOUND[program.dtype] * np.linalg.norm(want)


def run(program, module):
    """Compare a module with XLA, twice; then with NaN in the last entry of a batch, which no other may see."""
    arguments = arguments_of(program)
    want = wanted(program, arguments)
    for _ in range(2):
        check(program, module.invoke("main", *arguments)[0], want)
    for array in arguments[: program.batch]:
        array[-1] = np.nan
    (got,) = module.invoke("main", *arguments)
    check(program, got, want, slice(-1))
    assert np.isnan(np.asarray(got).astype("f8")[-1]).all()
    if program.symbolic:
        again = replace(program, shapes=_larger(program))
        arguments = arguments_of(again)
        check(program, module.invoke("main", *arguments)[0], wanted(again, arguments))


def _larger(program):
    """Return shapes with one more of each batch and 30 more of each other symbolic size."""
    more = {"b": 1, "t": 30, "s": 30}
    shapes = list(program.shapes)
    for n, names in program.symbolic.items():
        shapes[n] = (*(size + more[x] for size, x in zip(shapes[n], names)), *shapes[n][len(names) :])
    return tuple(shapes)


class TestOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_a_program_reads_its_operands_alone(self, name, poison):
        program = PROGRAMS[name]
        data = compiled(program)
        poison(driver.Gpu)
        run(program, aotc.load(data, devices="cuda"))


@pytest.mark.ir
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_have_the_templates_that_they_are_for(name):
    program = PROGRAMS[name]
    _, variant = gpu_program(*model_of(program), target=program.target)
    templates = {k.tiling.template for k in variant.kernels if k.tiling}
    templates = {FEW if isinstance(t, DecodeAttention) else t for t in templates}  # of any cluster
    assert templates >= {program.template} - {None}


@pytest.mark.cudasim
def test_poisoned_memory_on_a_simulated_gpu(monkeypatch, poison):
    """The harness itself, with a program that its loops compute in Python."""
    program = Program(cross, projected(2, 3, 5, width=64, depth=8), FEW, batch=2)
    data = compiled(program)
    install(monkeypatch, data)
    poison(SimulatedGpu)
    run(program, aotc.load(data))


@pytest.mark.cudasim
@pytest.mark.slow
@pytest.mark.parametrize("name", ["merged product, symbolic", "symbolic tokens", "one query, symbolic"])
def test_sizes_of_zero(name, monkeypatch):
    """The tensor maps of empty arrays are not refused; JAX's own assertions would refuse the sizes."""
    program = PROGRAMS[name]
    lines = model_of(program)[0].mlir_module().splitlines()
    text = "\n".join(line for line in lines if "@shape_assertion" not in line)
    data = aotc.compile(text.encode(), target=program.target)
    install(monkeypatch, data)
    module = aotc.load(data)
    for sizes in ({"b": 0, "s": 5}, {"b": 2, "s": 0}, {"b": 0, "s": 0}):
        shapes = [
            (*map(sizes.get, names), *shape[len(names) :]) if (names := program.symbolic.get(n)) else shape
            for n, shape in enumerate(program.shapes)
        ]
        (got,) = module.invoke("main", *arguments_of(replace(program, shapes=tuple(shapes))))
        want = jax.eval_shape(program.function, *(jax.ShapeDtypeStruct(s, program.dtype) for s in shapes))
        assert got.shape == want.shape
        assert not np.asarray(got).astype("f8").any()


def enlarge(monkeypatch):
    """Let tensor maps have as many lines as all batch entries together, of each."""
    real = build.template_launch

    def enlarged(kernel):
        threads, entry = real(kernel)
        for row in entry["maps"]:
            if len(row["sizes"]) > 2:
                lines, batch = row["sizes"][1], row["sizes"][-1]
                row["sizes"][1] = ["*", lines, batch] if kernel.dims else lines * batch
        return threads, entry

    monkeypatch.setattr(build, "template_launch", enlarged)


@pytest.mark.cudasim
@pytest.mark.parametrize("name", ["merged product", "merged product, symbolic"])
def test_a_tensor_map_beyond_its_array_is_refused(name, monkeypatch):
    """When the bundle is written if sizes are known, else when a call has them, before it begins."""
    program, entry = PROGRAMS[name], "bytes 0 to .* of its array"
    enlarge(monkeypatch)
    if not program.symbolic:
        with pytest.raises(InternalError, match=entry):
            compiled(program)
        return
    data = compiled(program)
    install(monkeypatch, data)
    with pytest.raises(BundleError, match=entry):
        aotc.load(data).invoke("main", *arguments_of(program))
