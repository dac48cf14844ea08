"""Large constants that a few numbers describe are computed where they are read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import close

import aotc
from aotc.lowering.analysis.computable import Banded, Progression, Repeated, Stepped, describe_array

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
ROW = RNG.standard_normal(300).astype("float32")
X = RNG.standard_normal((300, 300)).astype("float32")
LOWER, DIAGONAL = np.tri(300, 300, 2) > 0, np.eye(300, 300, -3, dtype="float32")
ELEMENTS = np.arange(90_000).reshape(300, 300) + 2
PERIODS = np.subtract.outer(np.arange(300) // 9 % 5, np.arange(300) % 7)
NUMBERS = np.broadcast_to(np.arange(300, dtype="int32")[:, None] * 3 - 7, (300, 300)).copy()


def rebuilt(found, shape, dtype):
    """Return the array that a description is of."""
    index = np.indices(shape)
    match found:
        case Repeated(part, dims):
            return np.broadcast_to(part.reshape([n if d in dims else 1 for d, n in enumerate(shape)]), shape)
        case Progression(start, step, dim):
            return (start + step * index[dim]).astype(dtype)
        case Stepped(start, axes):
            steps = (s.step * (index[s.dim] // s.every % (s.period or max(shape))) for s in axes)
            return (start + sum(steps)).astype(dtype)
        case Banded(triangle, offset, inside, outside, (i, j)):
            compare = np.greater_equal if triangle else np.equal
            return np.where(compare(index[i] + offset, index[j]), inside, outside)


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (25, 25)])
@pytest.mark.parametrize("offset", [-3, 0, 1, 4])
def test_banded_arrays_are_described_exactly(shape, offset):
    lower = np.tri(*shape, offset)
    for a in (lower, 1 - lower, np.where(lower > 0, -0.0, -np.inf), np.eye(*shape, offset, dtype="int8")):
        found = describe_array(a)
        assert isinstance(found, Banded)
        assert rebuilt(found, shape, a.dtype).tobytes() == a.tobytes()


ARRAYS = {
    "columns": np.repeat(RNG.standard_normal((30, 1)), 40, 1),
    "one axis of three": np.tile(RNG.standard_normal((1, 30, 1)), (4, 1, 5)),
    "a triangle for each head": np.tile(np.tri(30, 30), (2, 3, 1, 1)),
    "one number": np.full((7, 9), -0.0),
    "NaN": np.full((7, 9), np.nan),
    "numbers": NUMBERS,
    "floats in whole steps": np.arange(300, dtype="float32") * 3 - 7,
    "numbers of elements": np.arange(600, dtype="int32").reshape(20, 30) * 2 + 1,
    "numbers of elements of three axes": 9 - np.arange(600, dtype="float32").reshape(5, 1, 6, 20),
    "remainders": np.arange(300) % 7,
    "quotients": (np.arange(300) // 20).astype("int8"),
    "quotients and remainders": np.arange(300) // 20 % 4 * 5 - 3,
    "a period on each axis": np.add.outer(np.arange(30) % 7, np.arange(40) // 6).astype("float64"),
    "unsigned remainders": (250 - np.arange(300) % 7).astype("uint8"),
    "large numbers": np.arange(300).reshape(10, 30) + (1 << 40),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_descriptions_rebuild_the_exact_bytes(name):
    a = ARRAYS[name]
    found = describe_array(a)
    assert found is not None
    assert np.ascontiguousarray(rebuilt(found, a.shape, a.dtype)).tobytes() == a.tobytes()


@pytest.mark.parametrize(
    "a",
    [
        X, np.where(np.arange(30) % 2, -0.0, 0.0), np.arange(30) * 0.5, np.array([0, 2**60, 2**61]), np.zeros((0, 3)),
        np.array([0.0, np.nan, 1.0]), np.array([3.0, np.inf, 1.0]), np.array([0, 1, 1, 3]), np.array([0.0, 1.0, -0.0]),
        np.multiply.outer(np.arange(9), np.arange(9)), np.arange(300, dtype="float32") + (1 << 24),
        np.arange(40) % 7 > 2, np.arange(9) * 1j,
    ],
    ids=[
        "random", "signs of zeros", "halves", "large steps", "empty", "NaN", "infinity", "no period", "one -0.0",
        "products", "rounded floats", "booleans", "complex",
    ],
)
def test_irregular_arrays_have_no_description(a):
    assert describe_array(a) is None


def test_one_different_element_prevents_a_description():
    for y, x in ((299, 0), (150, 151), (0, 299)):
        for a in (DIAGONAL, LOWER, NUMBERS, np.tile(ROW, (300, 1)), ELEMENTS):
            changed = a.copy()
            changed[y, x] = not changed[y, x]
            assert describe_array(changed) is None


PROGRAMS = {
    "select": lambda x: jnp.where(LOWER, x, -1e9),
    "sum": lambda x: x + DIAGONAL,
    "rows": lambda x: x * np.tile(ROW, (300, 1)),
    "masked softmax": lambda x: jax.nn.softmax(x + np.where(LOWER, 0, -np.inf).astype("float32")),
    "transposed": lambda x: x * jnp.transpose(jnp.asarray(NUMBERS)),
    "numbers of elements": lambda x: x * (ELEMENTS * 2 + 1).astype("float32"),
    "remainders": lambda x: (x.reshape(-1) + np.arange(90_000, dtype="float32") % 7, jnp.asarray(PERIODS)),
    "quotients": lambda x: x.reshape(-1) * (np.arange(90_000) // 1000).astype("float32"),
    "result": lambda x: (jnp.asarray(NUMBERS), x + 1),
    "updated": lambda x: jnp.asarray(DIAGONAL).at[3].add(x[0]),
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.where(LOWER, c * x, i), jnp.asarray(DIAGONAL)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_with_described_constants_are_small_and_match_jax(name):
    data = aotc.compile(PROGRAMS[name], X, verify_each=True, source=False)
    close(aotc.load(data)(X), jax.jit(PROGRAMS[name])(X), factor=4)
    assert len(data) < 100_000
