"""LU and QR factors on GPUs: a block of threads for each matrix, as LAPACK has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_races import Races, checked
from jax._src.lax import linalg
from support.gpu_program import gpu_program, run_gpu_program
from support.lapack import agree
from support.solvers import DTYPES, values

from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.scratch import shared_bytes
from aotc.vmfb.dtypes import to_numpy


@pytest.fixture(autouse=True)
def _wide_numbers():
    with jax.enable_x64(True):
        yield


def check(function, *args):
    """Compare a function lowered for a GPU alone with XLA on the CPU."""
    program = gpu_program(function, args)
    agree([np.asarray(x) for x in run_gpu_program(*program, list(args))], jax.jit(function)(*args))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 7), (35, 5)])
def test_lu_on_gpus_matches_lapack(dtype, shape):
    check(lambda x: linalg.lu(x)[:2], values(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 4, 7), (35, 5)])
def test_geqrf_and_qr_on_gpus_match_lapack(dtype, shape):
    x = values(*shape, dtype=dtype)
    check(linalg.geqrf, x)
    check(jnp.linalg.qr, x)


def test_complete_qr_on_gpus_matches_lapack():
    check(lambda x: jnp.linalg.qr(x, mode="complete"), values(2, 7, 3, dtype="complex64"))


def test_the_first_of_equal_elements_is_the_pivot():
    check(lambda x: linalg.lu(x)[:2], np.where(values(34, 5, dtype="float64") > 0, 1.0, -1.0))


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_lu_and_qr_of_zero_columns_match_lapack(dtype):
    """No pivot is there, nor anything to reflect; the largest and the smallest numbers have norms too."""
    x = values(6, 6, dtype=dtype)
    x[:, 2] = 0
    x[3:, 4] = 0
    check(lambda x: linalg.lu(x)[:2], x)
    check(linalg.geqrf, x)
    check(linalg.geqrf, np.diag([1e30, 1, 1]).astype(dtype) + np.tri(3, dtype=dtype) * np.array(1e30, dtype))


def test_solve_on_gpus_matches_lapack():
    check(jnp.linalg.solve, values(2, 4, 4, dtype="float32"), values(2, 4, 2, dtype="float32", seed=3))


def test_factorizations_in_a_loop_kernel_match_lapack():
    """Its buffers get names of their own, those that threads exchange too."""
    x = values(4, 4, dtype="float32") * 0.1 + 3 * np.eye(4, dtype="float32")
    program = gpu_program(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: jnp.linalg.qr(jnp.cos(y) @ x)[0], x), [x])
    assert len(program[1].kernels) == 1
    want = x
    for _ in range(3):
        want = np.asarray(jnp.linalg.qr(jnp.cos(want) @ x)[0])
    agree(run_gpu_program(*program, [x]), [want])


def test_large_matrices_are_factored_on_the_host():
    x = jax.ShapeDtypeStruct((300, 300), "float32")
    with pytest.raises(Exception, match="LAPACK's geqrf is not supported"):
        gpu_program(linalg.geqrf, [x], host_fallback=False)


def factor_kernel(variant):
    """Return the text of the kernel that finds factors, and arrays for it."""
    (kernel,) = (k for k in variant.kernels if "lapack" in k.name)
    random = np.random.default_rng(0)
    arrays = [random.normal(size=x.shape).astype(to_numpy(x.dtype)) for x in (*kernel.inputs, *kernel.outputs)]
    return print_kernel(kernel), arrays


def races_in(text, arrays):
    """Return what threads of a kernel do to each other's numbers without a barrier between."""
    races = Races()
    checked(races)(text, arrays, {})
    return races.found


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (3, 35)])
@pytest.mark.parametrize("routine", ["getrf", "geqrf", "orgqr"])
def test_threads_of_factorizations_do_not_race(routine, shape):
    if routine == "orgqr":
        shape = min(shape), max(shape)
    taus = values(min(shape), dtype="float32", seed=2)
    function = {
        "getrf": linalg.lu, "geqrf": linalg.geqrf, "orgqr": lambda x: linalg.householder_product(x.T, taus),
    }[routine]  # fmt: skip
    _, variant = gpu_program(function, [values(*shape, dtype="float32")])
    text, arrays = factor_kernel(variant)
    assert races_in(text, arrays) == []
    if shape == (3, 35):
        alone = "\n".join(line for line in text.split("\n") if "warp_barrier" not in line)
        assert (races_in(alone, arrays) != []) == ("warp_barrier" in text)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 40, 40), "float32"), ((37, 50), "float32"), ((50, 37), "float64"), ((33, 33), "complex64"),
        ((17, 20), "complex128"), ((20, 9), "complex128"),
        *(pytest.param(shape, "float32", marks=pytest.mark.slow) for shape in [(2, 70, 70), (130, 33)]),
    ],
)  # fmt: skip
def test_blocked_lu_with_ragged_panels_matches_lapack(shape, dtype):
    """Of matrices of several panels, their rows and columns in no whole numbers of these."""
    x = values(*shape, dtype=dtype)
    check(lambda x: linalg.lu(x)[:2], x)
    x[..., 3] = 0
    x[..., 19:] = x[..., :1]
    program = gpu_program(lambda x: linalg.lu(x), [x])
    packed, _, order = (np.asarray(y) for y in run_gpu_program(*program, [x]))
    rows, columns = shape[-2:]
    least = min(rows, columns)
    lower = np.tril(packed, -1)[..., :least] + np.eye(rows, least)
    assert np.abs(lower).max() <= 1.5
    got = lower @ np.triu(packed)[..., :least, :]
    np.testing.assert_allclose(got, np.take_along_axis(x, order[..., None].astype(int), -2), atol=1e-4)


@pytest.mark.parametrize(("row", "column"), [(39, 5), (39, 38), (2, 20), (20, 2), (0, 39)])
def test_blocked_and_column_lu_propagate_the_same_nan(row, column):
    x = values(40, 40, dtype="float32")
    x[row, column] = np.nan
    found = []
    for memory in (0, 4096):
        program = gpu_program(lambda x: linalg.lu(x)[0], [x], shared_memory_limit=memory)
        found.append(np.isnan(np.asarray(run_gpu_program(*program, [x])[0])))
    assert np.array_equal(*found)
    assert 0 < found[0].sum() < found[0].size


@pytest.mark.parametrize(("shape", "memory"), [((600, 4), 0), ((40, 40), 4096)])
def test_tall_matrices_or_little_shared_memory_use_column_lu(shape, memory):
    """No block has a thread for each row, or the panel has no room in shared memory."""
    x = values(*shape, dtype="float32")
    program = gpu_program(lambda x: linalg.lu(x)[:2], [x], shared_memory_limit=memory)
    agree([np.asarray(y) for y in run_gpu_program(*program, [x])], jax.jit(lambda x: linalg.lu(x)[:2])(x))
    (kernel,) = (k for k in program[1].kernels if "lapack" in k.name)
    assert shared_bytes(kernel.body) <= 128


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((33, 20), "float64"), ((17, 20), "complex128"), ((20, 13), "complex128"),
        pytest.param((40, 40), "float64", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_threads_of_blocked_lu_do_not_race(shape, dtype):
    _, variant = gpu_program(linalg.lu, [values(*shape, dtype=dtype)])
    text, arrays = factor_kernel(variant)
    assert races_in(text, arrays) == []
    parts = text.split("barrier()")
    first = 1 if shape[0] <= 32 else 0  # lanes of a warp, who exchange numbers behind the first one
    for n in range(first, len(parts) - 1):
        alone = "barrier()".join(parts[: n + 1]) + "pass" + "barrier()".join(parts[n + 1 :])
        assert races_in(alone, arrays) != [], n
