"""The cost model: what it counts in loops, what its times follow, and that measured times stand in for them."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.threshold_rows import all_rows

from aotc.frontend.importer import import_model
from aotc.ir.dims.algebra import sym
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.cost_model import machines
from aotc.lowering.cost_model.kernel_work import PAIRS_WORK, KernelWork, evaluate_dim_estimate, work_of_kernel
from aotc.lowering.cost_model.machines import Level, machine_of
from aotc.lowering.cost_model.model import Costs, predict, predicted_kernel_time
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.profile.cost_record import kernel_text_digest

pytestmark = pytest.mark.ir
V4, GPU = TARGETS["cpu:x86-64-v4"], TARGETS["cuda:sm_90a"]
PAIRS, MATRIX = TARGETS["cpu:x86-64-v4-bf16"], TARGETS["cpu:x86-64-amx"]
OF_UNITS = {"pairs_work": PAIRS, "matrix_work": MATRIX, "tensor_work": GPU}
COUNTED = {"pairs_work", "line", "loop_entry", "complex_work", "integer_division", "tensor_work"}  # where work is
MACHINE_ROWS = [f for f in all_rows() if f.module == "cost_model.machines" or f.name in COUNTED]


def kernels(function, *shapes, dtype="float32", target=V4):
    """The kernels of a function, lowered."""
    types = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    options = Options(target=target.name)
    module = import_model(jax.export.export(jax.jit(function))(*types))
    return lower(run_passes(module, options), target, options).kernels


def work(function, *shapes, **more):
    """What the only kernel of a function does, with vectors of 64 bytes."""
    (kernel,) = kernels(function, *shapes, **more)
    return work_of_kernel(kernel, 64)


def test_dims_are_evaluated_with_assumed_sizes():
    n, i = sym("n"), sym("i", 0, 8)
    assert evaluate_dim_estimate(2 * n + 3, {"n": 5}) == 13
    assert evaluate_dim_estimate((n + i) // 4 % 3, {"n": 9, "i": 1}) == 2
    assert evaluate_dim_estimate(n, {}) == 16  # a size that only a call knows


def test_elementwise_kernels_count_as_vector_operations():
    found = work(lambda x: x * 2 + 1, (4096,))
    assert found.vector == pytest.approx(4096 / 16 * 5)  # two operations, a load, a store, the loop's own
    assert found.bytes == 2 * 4 * 4096
    assert found.chained == found.tile == 0
    assert found.random == []


def test_expensive_functions_count_their_measured_cost():
    plain, dear = work(lambda x: -x, (4096,)), work(jnp.exp, (4096,))
    assert dear.vector - plain.vector == pytest.approx(4096 / 16 * 9)


def test_integer_division_counts_as_scalar_operations():
    divided = work(lambda x: jax.lax.div(x, x), (4096,), dtype="int32")
    assert divided.vector > 20 * work(lambda x: x * x, (4096,), dtype="int32").vector


def test_matmuls_count_their_multiplications():
    found = work(lambda x, y: x @ y, (64, 64), (64, 64))
    assert found.tile == 2 * 64**3
    with jax.enable_x64(True):
        assert work(lambda x, y: x @ y, (64, 64), (64, 64), dtype="float64").tile == 4 * 64**3


def test_bf16_pair_matmuls_cost_half():
    """Packing the right operand is a kernel of its own."""
    found = kernels(lambda x, y: x @ y, (64, 64), (64, 64), dtype="bfloat16", target=PAIRS)
    assert [work_of_kernel(k, 64).tile for k in found] == [0, 2 * 64**3 * PAIRS_WORK.value / 100]


def test_matrix_unit_matmuls_cost_a_twelfth():
    """Of i8 half of that; what is as on other CPUs costs as much."""
    for dtype, sums, size in (("bfloat16", "float32", 2), ("int8", "int32", 1)):
        function = partial(jnp.matmul, preferred_element_type=sums)
        found = kernels(function, (64, 64), (64, 64), dtype=dtype, target=MATRIX)
        each = [work_of_kernel(k, 64, matrices=MATRIX.matrices).tile for k in found]
        assert each == [0, 2 * 64**3 * machines.MATRIX_WORK.value / 100 * size / 2]
        assert predict(found[-1], MATRIX).compute < predict(found[-1], PAIRS).compute
    (found,) = kernels(lambda x, y: x @ y, (64, 64), (64, 64), target=MATRIX)
    assert predict(found, MATRIX).compute == predict(found, V4).compute


def test_gathers_count_random_accesses():
    found = work(lambda x, i: x[i[:, 0].astype("int32")], (1000,), (500, 1))
    assert sum(count for count, _ in found.random) >= 500
    assert any(size == 4000 for _, size in found.random)


def test_gathers_of_rows_count_contiguous_accesses():
    *_, last = kernels(lambda x, i: x[i[:, 0].astype("int32")], (1000, 64), (500, 1))
    elements = sum(count for count, size in work_of_kernel(last, 64).random if size == 4 * 64_000)
    assert 0 < elements <= 1000


def test_scans_count_as_dependent_operations():
    assert sum(work_of_kernel(k, 64).chained for k in kernels(jnp.cumsum, (4096,))) > 0
    assert sum(work_of_kernel(k, 64).chained for k in kernels(lambda x: jnp.cumsum(x, 0), (8, 4096))) < 4096


def test_strided_reads_count_whole_cache_lines():
    plain, strided = work(lambda x: x[:, :256] * 2, (512, 512)), work(lambda x: x[:, ::2] * 2, (512, 512))
    assert not plain.random
    assert strided.random


@pytest.mark.parametrize("target", [V4, GPU], ids=["cpu", "cuda"])
@pytest.mark.parametrize(
    "function",
    [lambda x: x + 1, jnp.exp, lambda x: x.sum(1), lambda x: x.sum(0), lambda x: x @ x, lambda x: x.T * 2],
    ids=["add", "exp", "rows", "columns", "product", "transpose"],
)
def test_predicted_time_grows_with_the_size(function, target):
    sizes = (4, 64, 4096) if target is GPU else (4, 32, 128, 512)
    times = [sum(predict(k, target).ns for k in kernels(function, (n, n), target=target)) for n in sizes]
    assert target is GPU or times == sorted(times)  # a GPU has another kernel for longer rows
    assert times[-1] > times[0]


def test_each_kernel_has_the_expected_bound():
    bound = lambda function, *shapes: predict(kernels(function, *shapes)[0], V4).bound
    assert bound(lambda x: x + 1, (4,)) == "overhead"
    assert bound(lambda x: x + 1, (1 << 24,)) == "memory"
    assert bound(jnp.sin, (1 << 20,)) == "compute"
    assert bound(lambda x: x @ x, (256, 256)) == "compute"


def test_wider_vectors_have_lower_predicted_times():
    (kernel,) = kernels(jnp.tanh, (4096,))
    assert predict(kernel, V4).compute < predict(kernel, TARGETS["cpu:x86-64-v3"]).compute


def test_copies_read_and_write_each_byte():
    costs = Costs(V4)
    assert costs.copy_nanoseconds(0) == machines.LAUNCH.value
    more = costs.copy_nanoseconds(1 << 18) - costs.copy_nanoseconds(0)
    assert more == pytest.approx((1 << 19) / machines.L2_BYTES.value)


def test_larger_arrays_use_slower_memory_levels():
    machine = machine_of(V4)
    assert machine.level_of(1000).rate > machine.level_of(1 << 19).rate > machine.level_of(1 << 22).rate
    last = machine.levels[-1]
    assert machine.level_of(1 << 40) == Level("memory", float("inf"), last.rate, last.random)


PROGRAMS = [
    (jnp.exp, (3000,)),
    (lambda x: x @ x, (1024, 1024)),
    (lambda x: x.astype("bfloat16") @ x.astype("bfloat16"), (1024, 1024)),
    (lambda x: jax.lax.div(x.astype("int32"), 3), (300,)),
    (jnp.cumsum, (300,)),
    (lambda x: x[:, ::2] * 2, (1000, 1000)),
    (lambda x: jax.lax.complex(x, x) * jax.lax.complex(x, -x), (5000,)),
    *((lambda x: x + 1, (n,)) for n in (512, 40_000, 1 << 20, 1 << 24)),
    *((lambda x: x[(x[:, 0] * 7).astype("int32")], (rows, 1)) for rows in (1000, 40_000, 1 << 20, 1 << 24)),
]


@functools.cache
def programs(target):
    return [k for function, shape in PROGRAMS for k in kernels(function, shape, target=target)]


def times(target):
    """Times of programs, and of work that no kernel does as much of."""
    works = [KernelWork(chained=1e6), KernelWork(tile=1e6)]
    return [
        *(predict(k, target).ns for k in programs(target)),
        *(predicted_kernel_time(w, machine_of(target)).ns for w in works),
    ]


@pytest.mark.parametrize("found", MACHINE_ROWS, ids=lambda found: found.name)
def test_each_machine_parameter_changes_a_prediction(found):
    row = found.row
    if row is machines.GPU_ITEM:
        return  # it is nothing
    target = GPU if found.name.startswith("gpu_") else OF_UNITS.get(found.name, V4)
    before = times(target)
    value = row.value
    try:
        object.__setattr__(row, "default", 4 * value)
        assert times(target) != before
    finally:
        object.__setattr__(row, "default", value)


# ---------------------------------------------------------------- measured times


def record(kernel, ns, sizes=None, device="cpu"):
    """A record of one kernel."""
    digest = kernel_text_digest(print_kernel(kernel))
    row = {"digest": digest, "name": kernel.name, "loc": "", "ops": 1, "bytes": 1, "runs": 1}
    return {"kernels": [{**row, "sizes": sizes or {}, "ns": {device: ns}}]}


def test_a_measured_time_replaces_a_prediction():
    (kernel,) = kernels(jnp.tanh, (4096,))
    assert Costs(V4).of(kernel).ns == predict(kernel, V4).ns
    found = Costs(V4, record(kernel, 12345.0)).of(kernel)
    assert found.ns == found.measured == 12345.0
    assert found.predicted == predict(kernel, V4)


def test_measurements_match_kernels_by_text_without_the_name():
    first, second = (kernels(f, (4096,))[0] for f in (jnp.tanh, jnp.cos))
    renamed = parse_kernel(print_kernel(first).replace(first.name, "another"))
    costs = Costs(V4, record(first, 12345.0))
    assert costs.of(renamed).measured == 12345.0
    assert costs.of(second).measured is None
    assert costs.unmatched_measurements([second]) == [first.name]
    assert costs.unmatched_measurements([second, renamed]) == []


def test_a_time_measured_at_other_sizes_is_scaled():
    (n,) = jax.export.symbolic_shape("n")
    (kernel,) = kernels(jnp.tanh, (n,))
    (dim,) = kernel.dims
    costs = Costs(V4, record(kernel, 12345.0, {dim: 4096}))
    exact, other = costs.of(kernel, {dim: 4096}), costs.of(kernel, {dim: 1 << 20})
    assert (exact.measured, exact.scaled) == (12345.0, False)
    assert other.scaled
    error = 12345.0 / predict(kernel, V4, {dim: 4096}).ns
    assert other.measured == pytest.approx(error * predict(kernel, V4, {dim: 1 << 20}).ns)


def test_measured_times_of_other_devices_are_ignored():
    (kernel,) = kernels(jnp.tanh, (4096,))
    assert Costs(V4, record(kernel, 1.0, device="cuda")).of(kernel).measured is None


def test_predictions_at_other_sizes_scale_by_the_measured_error():
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n"), np.float32)
    options = Options(target=V4.name)
    module = import_model(jax.export.export(jax.jit(jnp.tanh))(shape))
    (kernel,) = lower(run_passes(module, options), V4, options).kernels
    costs = Costs(V4, record(kernel, 3 * predict(kernel, V4, {"n": 5000}).ns, {"n": 5000}))
    assert costs.of(kernel, {"n": 5000}).ns == 3 * predict(kernel, V4, {"n": 5000}).ns
    assert costs.of(kernel, {"n": 70_000}).ns == pytest.approx(3 * predict(kernel, V4, {"n": 70_000}).ns)
