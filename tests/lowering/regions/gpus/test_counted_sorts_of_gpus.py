"""Rows that are sorted by counting what goes before each element, over all multiprocessors of a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_races import Races, checked
from support.differential import integers, normal
from support.gpu_program import check_gpu, gpu_program

from aotc.ir.loop.ir import Barrier, walk
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.passes.parallelize_gpu import merge_sort as sorts
from aotc.lowering.passes.parallelize_gpu.scatter_add import COUNTED_UPDATES

pytestmark = pytest.mark.cudasim


@pytest.fixture
def by_counting(monkeypatch):
    monkeypatch.setattr(sorts, "sorted_width", lambda dtypes, target: 1 << 20)


def counted(variant):
    (kernel,) = (k for k in variant.kernels if "sort" in k.name)
    barriers = sum(isinstance(s, Barrier) for s in walk(kernel.body))
    return barriers == 1 and "parts" in print_kernel(kernel)


@pytest.mark.parametrize("shape", [(40,), (64,), (100,), (3, 70), (2, 257)])
@pytest.mark.usefixtures("by_counting")
def test_counting_sort_is_stable(shape):
    x = integers(*shape, low=0, high=9)
    assert counted(check_gpu(jnp.argsort, [x]))
    x = normal(*shape)
    x.flat[:3] = np.nan, -0.0, np.inf
    assert counted(check_gpu(jnp.sort, [x]))


@pytest.mark.usefixtures("by_counting")
def test_counting_sort_of_several_arrays_matches_jax():
    keys, others = integers(2, 90, low=0, high=5), normal(2, 90)
    check_gpu(lambda k, x: jax.lax.sort((-k, x), num_keys=1), [keys, others])
    check_gpu(lambda k: jnp.sort(k, 0, descending=True), [integers(90, 2)])


@pytest.mark.usefixtures("by_counting")
def test_threads_do_not_race_over_counts():
    _, variant = gpu_program(lambda x: jax.lax.sort(x, is_stable=False), [np.zeros(100, "i4")])
    kernel = next(k for k in variant.kernels if "sort" in k.name)
    races = Races()
    x, out = (integers(*b.shape, low=0, high=50).astype("i4") for b in (*kernel.inputs, *kernel.outputs))
    checked(races)(print_kernel(kernel), [x, out], {})
    assert races.found == []
    np.testing.assert_array_equal(out, np.sort(x))


@pytest.mark.parametrize("more", [0, 1])
def test_many_updates_are_sorted_in_runs(more):
    count = COUNTED_UPDATES.value + more
    shapes = ((50, 32), "float32"), ((count,), "int32"), ((count, 32), "float32")
    types = [jax.ShapeDtypeStruct(*x) for x in shapes]
    _, variant = gpu_program(lambda x, i, u: x.at[i].add(u), types)
    assert len([k for k in variant.kernels if "sort" in k.name]) == (1 if not more else 3)
