"""Constants that little data describes take few bytes of a bundle, as each operand of each op."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import close

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.opset import ELEMENTWISE, OPS
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.inline import inline
from aotc.options import Options
from aotc.vmfb.devices.cuda import driver

pytestmark = pytest.mark.cpu

N = 160  # 100 kB of f32: more than is folded in any case
CODE = 200_000  # bytes of a bundle of a few kernels, at most; the constants of each program have more
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((N, N)), "float32")
INDEX = np.arange(N)
DISTANCE = np.subtract.outer(INDEX, INDEX)

FORMS = {
    "identity": np.eye(N),
    "triangle": np.tri(N),
    "one-hot rows": np.eye(N)[RNG.integers(0, N, N)],
    "permutation": np.eye(N)[RNG.permutation(N)],
    "checkerboard": np.add.outer(INDEX, INDEX) % 2 + 1,
    "blocks on a diagonal": np.kron(np.eye(10), np.ones((16, 16))),
    "band": abs(DISTANCE) < 9,
    "distances": abs(DISTANCE),
    "bias of distances": RNG.standard_normal(2 * N)[DISTANCE + N],
    "lengths": RNG.integers(1, N, N)[:, None] > INDEX,
    "ramp": np.linspace(0.3, 4, N * N).reshape(N, N),
    "zeros and ones": np.repeat([0, 1, 2, 1], N * N // 4).reshape(N, N),
    "repeated rows": np.tile(RNG.standard_normal(N), (N, 1)),
    "numbers": np.arange(N * N).reshape(N, N),
    "remainders": np.arange(N * N).reshape(N, N) % 7 + 1,
}
FORMS = {name: np.ascontiguousarray(a, "float32") for name, a in FORMS.items()}
INDICES = {name: FORMS[name].astype("int32") for name in ("triangle", "checkerboard", "distances", "remainders")}
REGULAR = {"triangle": np.tri(N, dtype="float32"), "identity": np.eye(N, dtype="float32") * 2}


def of_all(op, constants=FORMS):
    """Return a function of ``x`` that applies ``op`` to it and each constant."""
    return lambda x: [op(x, jnp.asarray(c)) for c in constants.values()]


def images(c):
    return c.reshape(1, N, N, 1)


def window(c, size=3):
    return lax.reduce_window(c, -np.inf, lax.max, (size, size), (1, 1), "SAME")


def gathered(table, rows):
    return table.at[rows].get(mode="clip")


def convolution(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pooled_gradient(x, c):
    return jax.vjp(lambda y: lax.reduce_window(y, -np.inf, lax.max, (2, 2), (2, 2), "VALID"), x)[1](c[::2, ::2])[0]


def product_of_bytes(x, c):
    x, c = (jnp.clip(v, -99, 99).astype(jnp.int8) for v in (x, c))
    return lax.dot(x, c, preferred_element_type=jnp.int32)


def placed(x, c):
    return lax.fori_loop(0, 3, lambda i, s: jnp.tanh(s @ c) + x, c)


PROGRAMS = {
    "elementwise": of_all(lambda x, c: jnp.maximum(x * c, c - x)),
    "select": of_all(lambda x, c: jnp.where(c > 0.5, x, c)),
    "results": of_all(lambda x, c: c),
    "moved results": of_all(lambda x, c: c.T[::-1, : N - 5]),
    "reshape and pad": of_all(lambda x, c: jnp.pad(c.reshape(N // 2, -1), 1)),
    "concatenate": of_all(lambda x, c: jnp.concatenate([c, x, c])),
    "bitcast": of_all(lambda x, c: lax.bitcast_convert_type(c, jnp.int32)),
    "reduce precision": of_all(lambda x, c: lax.reduce_precision(c, 5, 5) + x),
    "dynamic slice": of_all(lambda x, c: lax.dynamic_slice(c, (x[0, 0].astype(int), 3), (9, 20))),
    "update": of_all(lambda x, c: lax.dynamic_update_slice(c, x[:3], (x[0, 0].astype(int), 0))),
    "updates": of_all(lambda x, c: lax.dynamic_update_slice(x, c[:, 5:], (0, x[0, 0].astype(int)))),
    "gather": of_all(lambda x, c: gathered(c, x[0].astype(int) % N)),
    "gather by indices": of_all(lambda x, c: gathered(x[0], c), INDICES),
    "scatter": of_all(lambda x, c: c.at[x[:9, 0].astype(int)].add(x[0])),
    "scatter of updates": of_all(lambda x, c: x.at[x[:, 0].astype(int) % N].add(c)),
    "scatter by indices": of_all(lambda x, c: x[0].at[c].add(x), INDICES),
    "sum": of_all(lambda x, c: (c * x).sum(0) + c.sum(1)),
    "running sum": of_all(lambda x, c: jnp.cumsum(c + x[0, 0], 1)),
    "argmax": of_all(lambda x, c: jnp.argmax(c + x[0], 1)),
    "window": of_all(lambda x, c: window(c) + x),
    "gradient of a pool": of_all(pooled_gradient),
    "gradient of a pool of a constant": of_all(lambda x, c: pooled_gradient(c, x)),
    "product from the right": of_all(lambda x, c: x[:9] @ c),
    "product from the left": of_all(lambda x, c: c @ x[:, :9]),
    "product of bytes": of_all(product_of_bytes),
    "convolution of an image": of_all(lambda x, c: convolution(images(c), x[:3, :9].reshape(3, 3, 1, 3))),
    "convolution by a kernel": of_all(lambda x, c: convolution(x[:4].reshape(1, 8, 8, 10), c.reshape(4, 4, 10, N))),
    "attention": of_all(lambda x, c: jax.nn.softmax(x @ x.T + c) @ x),
    "attention of constants": of_all(lambda x, c: jax.nn.softmax(c @ x.T) @ c),
    "fft": of_all(lambda x, c: jnp.fft.rfft(c).real * x[0, 0]),
    "sort": of_all(lambda x, c: jnp.sort(c) + x),
    "sort by another": of_all(lambda x, c: lax.sort((x, c), num_keys=1)[1]),
    "largest": of_all(lambda x, c: lax.top_k(c, 5)[0] + x[0, 0]),
    "cholesky": of_all(lambda x, c: jnp.linalg.cholesky(c) + x, {"identity": REGULAR["identity"]}),
    "triangular solve": of_all(lambda x, c: lax.linalg.triangular_solve(c, x, left_side=True, lower=True), REGULAR),
    "triangular solve of constants": of_all(
        lambda x, c: lax.linalg.triangular_solve(x + 99 * np.eye(N, dtype="f"), c, left_side=True, lower=True)
    ),
    "eigenvalues": of_all(lambda x, c: jnp.linalg.eigvalsh(c) + x[0, 0], {"identity": REGULAR["identity"]}),
    "loop": of_all(placed, {k: FORMS[k] for k in ("identity", "band", "ramp", "repeated rows", "permutation")}),
    "branch": of_all(lambda x, c: lax.cond(x[0, 0] > 0, lambda: c, lambda: x + c[0, 0])),
    "branch of a product": of_all(lambda x, c: lax.cond(x[0, 0] > 0, lambda: x @ c, lambda: x)),
}  # fmt: skip


def bundle_of(name, **options):
    return aotc.compile(PROGRAMS[name], X, verify_each=True, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_bundles_contain_no_described_constants(name):
    """Results are compared with eager JAX, which folds nothing."""
    data = bundle_of(name)
    close(aotc.load(data)(X), PROGRAMS[name](X), factor=256)
    assert len(data) < CODE


# What takes no large array, or is of several devices, or of types that few models have.
WITHOUT = {
    "constant", "iota", "dim", "assert", "fail", "bind_dim", "call", "rng_bit_generator", "partition_id", "replica_id",
    "transfer", "custom_call", "csr_dot", "tridiagonal_solve_perturbed",
}  # fmt: skip
SEVERAL = {
    ("dot_general", 0), ("dot_general", 1), ("convolution", 0), ("convolution", 1), ("gather", 0), ("gather", 1),
    ("scatter", 0), ("scatter", 1), ("scatter", 2), ("dynamic_update_slice", 0), ("dynamic_update_slice", 1),
    ("triangular_solve", 0), ("triangular_solve", 1), ("select_and_scatter", 0), ("select_and_scatter", 1),
    ("sort", 0), ("sort", 1), ("select", 1), ("select", 2), ("while", 0), ("case", 0),
}  # fmt: skip


def operands_of(name):
    """Yield the op and the number of the operand, or of the result of a branch, that is made of constants."""
    module = inline(import_model(jax.jit(PROGRAMS[name]), X), Options())
    for f in module.functions.values():
        made = set()
        for op in walk(f.body):
            values = [*enumerate(op.operands), *(pair for r in op.regions for pair in enumerate(r.results))]
            yield from ((op.name, n) for n, v in values if v in made and np.prod(v.type.shape) > 1000)
            if not op.regions and made.issuperset(op.operands):
                made.update(op.results)


def test_the_programs_have_constants_as_each_operand_of_each_op():
    found = {pair for name in PROGRAMS for pair in operands_of(name)}
    several = {op for op, spec in OPS.items() if not spec.added_by and spec.removed_by != "lower_collectives"}
    assert several - WITHOUT - ELEMENTWISE.keys() - {op for op, _ in found} == set()
    assert SEVERAL - found == set()


ON_GPU = ["product from the right", "scatter of updates", "sort", "fft", "window", "results", "gather"]


@pytest.mark.parametrize("name", ON_GPU)
def test_gpu_bundles_contain_no_described_constants(name):
    assert len(bundle_of(name, target="cuda:sm_90", source=False)) < 1.5 * CODE


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
@pytest.mark.parametrize("name", ON_GPU)
def test_described_constants_on_a_gpu_match_jax(name):
    close(aotc.load(bundle_of(name, target="cuda"))(np.asarray(X)), PROGRAMS[name](X), factor=1024)
