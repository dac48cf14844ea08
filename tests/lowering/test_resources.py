"""A region takes no more of a target than there is: what does not fit is computed again, split or moved."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, normal

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.dims.algebra import product
from aotc.ir.loop.ir import Alloc, walk
from aotc.lowering.lower import lower
from aotc.lowering.passes.fuse.fuse import fuse_recorded
from aotc.lowering.passes.fuse.record import FusionRecord
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.dtypes import size_of

INPUTS = Path(__file__).parents[1] / "inputs"
OPT_IN = 227 << 10
LENGTHS = (1, 2, 37, 95, 512, 4097, 1 << 16, 1 << 20)


def lowered(model, arguments=(), **flags):
    """The kernels of a model, and what fusion decided."""
    options = Options(**flags)
    module = run_passes(import_raw(fetch(model, tuple(arguments), {}), options=options), options)
    return lower(module, resolve_targets(options.target)[0], options).kernels


def taken(kernel, space):
    """The bytes of the arrays that a kernel makes in a space; one number is none."""
    made = {s.buffer for s in walk(kernel.body) if isinstance(s, Alloc) and s.buffer.space == space and s.buffer.shape}
    return sum(int(product(b.shape)) * size_of(b.dtype) for b in made)


def random_rows(seed, length):
    """A function of rows of some length: elementwise ops, sums, products and softmax, whose values are read again."""

    def function(x, y):
        rng = np.random.default_rng(seed)
        values = [x, y]
        for _ in range(10):
            a, b = (values[-1 - int(rng.integers(min(4, len(values))))] for _ in range(2))
            steps = (
                lambda a, b: a + b, lambda a, b: a * b, lambda a, b: jnp.exp(-a * a), lambda a, b: jnp.tanh(a) - b,
                lambda a, b: a - b.mean(-1, keepdims=True), lambda a, b: a / (1 + jnp.abs(b).max(-1, keepdims=True)),
                lambda a, b: jax.nn.softmax(a), lambda a, b: b - a.sum(0),
            )  # fmt: skip
            values.append(steps[int(rng.integers(len(steps)))](a, b))
        return values[-1], values[-2]

    return function, [jax.ShapeDtypeStruct((3, length), "float32")] * 2


@pytest.mark.ir
@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cuda:sm_80", "cuda:sm_86", "cuda:sm_90"])
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(n, marks=pytest.mark.slow) for n in range(6, 200))])
def test_random_row_kernels_fit_the_limits(seed, target):
    rng = np.random.default_rng(seed)
    function, arguments = random_rows(seed, LENGTHS[seed % len(LENGTHS)])
    shared, stack = (int(rng.choice([0, 1, 64, 1000, 4096, 40_000])) for _ in range(2))
    kernels = lowered(function, arguments, target=target, shared_memory_limit=shared, stack_limit=stack)
    for kernel in kernels:
        assert taken(kernel, "shared") <= min(shared or OPT_IN, resolve_targets(target)[0].shared_memory)
        if target.startswith("cpu"):
            assert taken(kernel, "private") <= (stack or resolve_targets(target)[0].stack)


@pytest.mark.ir
@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cuda:sm_80", "cuda:sm_86", "cuda:sm_90"])
@pytest.mark.parametrize("name", ["groupnorm_silu", "softmax_mul"])
def test_long_rows_are_split(name, target):
    counts = [len(lowered(INPUTS / f"{name}.mlir", target=target, opt_level=level)) for level in (0, 2, 3)]
    fused = lowered(INPUTS / f"{name}.mlir", target=target, shared_memory_limit=4096, stack_limit=32 << 10)
    assert 1 <= counts[2] <= counts[1] < counts[0]
    assert counts[1] <= len(fused) < counts[0]
    assert all(taken(k, "shared") <= 4096 for k in fused)


@pytest.mark.ir
@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90"])
def test_a_refusal_states_the_required_and_available_bytes(target):
    options = Options(target=target)
    stages = []
    text = (INPUTS / "softmax_mul.mlir").read_text()
    many = text.replace("<32", "<1024")  # each with a block: fewer are reduced in parts
    module = import_raw(fetch(many, (), {}), options=options)
    run_passes(module, options, lambda _, step, after: stages.append((step.name, after)))
    before = stages[[name for name, _ in stages].index("split-rows") - 1][1]  # which would read the rows in parts
    record = FusionRecord()
    fuse_recorded(before, options, record)
    (refused,) = [v for v in record.verdicts if not v.taken and "bytes of a row" in v.reason]
    limit = resolve_targets(target)[0].shared_memory
    assert f"1,048,576 bytes of a row > {limit - 256:,} bytes of shared memory" in refused.reason
    assert [op.name for op in refused.ops] == ["div"]


@pytest.mark.cpu
@pytest.mark.parametrize("name", ["groupnorm_silu", "softmax_mul"])
def test_inspect_lists_the_shared_memory_of_long_rows(name):
    for flags, limit in ({}, OPT_IN), ({"opt_level": 3}, OPT_IN), ({"shared_memory_limit": 4096}, 4096):
        data = aotc.compile(INPUTS / f"{name}.mlir", target="cuda:sm_80,cuda:sm_90", **flags)
        for variant in describe_bundle(open_bundle(data), len(data))["variants"]:
            taken: dict[str, int] = {}
            for row in variant["buffers"]:
                if row["space"] == "shared":
                    taken[row["of"]] = taken.get(row["of"], 0) + row["bytes"]
            assert 0 < max(taken.values()) <= limit


@pytest.mark.cpu
@pytest.mark.parametrize("flags", [{}, {"opt_level": 3}, {"stack_limit": 32 << 10}, {"stack_limit": 64}], ids=str)
@pytest.mark.parametrize("name", ["groupnorm_silu", "softmax_mul"])
def test_split_long_rows_match_unfused_code(name, flags):
    model = INPUTS / f"{name}.mlir"
    (main,) = import_raw(fetch(model, (), {})).functions.values()
    shapes = [v.type.shape for v in main.body.params]
    arguments = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    fused, apart = (aotc.load(aotc.compile(model, **f))(*arguments) for f in (flags, {"opt_level": 0}))
    np.testing.assert_allclose(fused, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.ir
def test_arrays_beyond_the_stack_are_scratch_memory():
    function, arguments = (lambda x: jnp.exp(x).sum(0)), [jax.ShapeDtypeStruct((64, 512), "float32")]
    (kernel,) = lowered(function, arguments, target="cpu:x86-64-v3")
    assert taken(kernel, "private") == 1024
    (kernel,) = lowered(function, arguments, target="cpu:x86-64-v3", stack_limit=256)
    assert (taken(kernel, "private"), taken(kernel, "scratch")) == (0, 1024)


@pytest.mark.cpu
@pytest.mark.parametrize("flags", [{}, {"stack_limit": 64}, {"opt_level": 3}, {"opt_level": 0}], ids=str)
def test_memory_limits_do_not_change_results(flags):
    def function(x, y):
        return jnp.exp(x).sum(0), jax.nn.softmax(x * y) * y, (x @ y.T).max(0)

    arguments = [normal(32, 200), normal(32, 200)]
    module = aotc.load(aotc.compile(jax.jit(function), *arguments, verify_each=True, **flags), threads=2)
    close(module(*arguments), jax.jit(function)(*arguments), factor=20)


@pytest.mark.cpu
@pytest.mark.parametrize("limit", ["stack_limit", "shared_memory_limit"])
def test_a_negative_limit_is_refused(limit):
    with pytest.raises(aotc.CompileError, match=f"{limit} is -1"):
        aotc.compile(jax.jit(jnp.sin), np.float32(1), **{limit: -1})
