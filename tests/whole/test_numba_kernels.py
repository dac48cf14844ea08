"""Programs whose kernels Numba's front end compiles from their printed text, beside the default's and XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")

from support import small_models
from support.differential import close, integers, normal
from support.small_models import MODELS

import aotc

pytestmark = pytest.mark.cpu

X, Y, SQUARE = normal(3, 5), normal(3, 5, seed=1), normal(6, 6)
N, WIDE = integers(4, 6), integers(3, 5, dtype="int64")
PROGRAMS = {
    "add": (lambda x, y: x + y * 2, X, Y),
    "integers": (lambda n: (n // 3, n % 3, n << 2, n >> 1, n * n), N),
    "small integers": (lambda n: n.astype("int8") * n.astype("int8"), N * 30),
    "unsigned": (lambda n: (n.astype("uint32") - 1, n.astype("uint8") // 7), N),
    "comparisons": (lambda x, y: (x < y, x == y, (x > 0) & ~(y > 0)), X, Y),
    "select": (lambda x, y: jnp.where(x > y, x, -y), X, Y),
    "functions": (lambda x: (jnp.tanh(x), jnp.exp(x), jnp.log1p(x * x), jax.lax.rsqrt(x * x + 1)), X),
    "erf": (lambda x: (jax.lax.erf(x), jax.nn.gelu(x)), X),
    "power": (lambda x, y: jnp.abs(x) ** y, X, Y),
    "rounding": (lambda x: (jnp.floor(x), jnp.ceil(x), jnp.round(x), jnp.sign(x)), X * 3),
    "bf16": (lambda x, y: (x.astype("bfloat16") * y.astype("bfloat16")).sum(1), X, Y),
    "f16": (lambda x, y: x.astype("float16") / y.astype("float16"), X, Y),
    "f8": (lambda x: x.astype(jnp.float8_e4m3fn).astype("float32") + 1, X),
    "conversions": (lambda x: (x.astype("int32"), (x * 100).astype("uint8"), x.astype("bool")), X),
    "bits": (lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32), X),
    "complex": (lambda x, y: (jax.lax.complex(x, y) * (1 + 2j), jnp.abs(jax.lax.complex(x, y))), X, Y),
    "transpose": (lambda x: x.T, X),
    "concatenate": (lambda x, y: jnp.concatenate([x, y[:, ::-1]], 1), X, Y),
    "pad": (lambda x: jax.lax.pad(x, 0.5, ((1, 2, 1), (0, -1, 0))), X),
    "slice": (lambda x: x[1:, ::2], X),
    "gather": (lambda x, n: x[jnp.abs(n[:, 0]) % 3], X, N),
    "scatter": (lambda x, n: x.at[jnp.abs(n[:, 0]) % 3].add(1.0), X, N),
    "sum": (lambda x: (x.sum(), x.sum(0), x.max(1)), X),
    "argmax": (lambda x: (x.argmax(1), x.argmin()), X),
    "softmax": (lambda x: jax.nn.softmax(x), X),
    "cumulative sum": (lambda x: jnp.cumsum(x, 1), X),
    "matmul": (lambda x, y: x @ y.T, X, Y),
    "matmul of integers": (lambda n: jnp.dot(n.astype("int8"), n.T.astype("int8"), preferred_element_type="int32"), N),
    "sort": (lambda x: (jnp.sort(x, 1), jax.lax.top_k(x, 2)), X),
    "while": (lambda x: jax.lax.while_loop(lambda s: s[1] < 5, lambda s: (s[0] * 0.5, s[1] + 1), (x, 0)), X),
    "random": (lambda n: jax.random.uniform(jax.random.key(3), (4,)) + n[0, 0], N),
    "fft": (lambda x: jnp.fft.fft(x), X),
}


@pytest.fixture(scope="module")
def bundle():
    """All programs as the functions of one bundle, with kernels by Numba."""
    functions = {name.replace(" ", "_"): row[0] for name, row in PROGRAMS.items()}
    args = {name.replace(" ", "_"): row[1:] for name, row in PROGRAMS.items()}
    return aotc.load(aotc.compile({n: jax.jit(f) for n, f in functions.items()}, args=args, kernel_compiler="numba"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_compiled_by_numba_match_xla(bundle, name):
    function, *args = PROGRAMS[name]
    flat = jax.tree.leaves(jax.jit(function)(*args))
    close(bundle.invoke(name.replace(" ", "_"), *args), flat, factor=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_compiled_by_numba_match_xla(name):
    function, weights, x, tolerance = MODELS[name]
    module = aotc.load(aotc.compile(jax.jit(function), weights, x, kernel_compiler="numba"))
    small_models.close(module.invoke("main", *weights, x), jax.jit(function)(weights, x), tolerance)


@pytest.mark.slow
def test_a_case_of_each_op_compiled_by_numba_matches():
    """The first case of each group of jax's test harnesses."""
    pytest.importorskip("absl")
    from conformance import harnesses
    from conformance.case import NotRun, run

    first = {case.label: case for case in reversed(harnesses.cases()) if not case.skip}
    problems = []
    for case in first.values():
        try:
            verdict = run(case, kernel_compiler="numba")
        except NotRun:
            continue
        if verdict.problem:
            problems.append(f"{case.name}: {verdict.problem}")
    assert not problems, "\n".join(problems)


def test_an_unknown_compiler_is_refused():
    with pytest.raises(aotc.CompileError, match=r"(?s)kernel_compiler is 'gcc'.*direct or numba"):
        aotc.compile(lambda x: x, np.zeros(2, "f4"), kernel_compiler="gcc")
