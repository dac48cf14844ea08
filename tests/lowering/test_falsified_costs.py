"""Decisions go by the cost model, and by measured times before it: false ones change each, as explain shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.diagnostics import AotcWarning
from aotc.frontend.importer import import_model
from aotc.lowering.cost_model.model import StaleCosts
from aotc.lowering.program.list_schedule import critical_paths, list_schedule_order, makespan
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.tools.explain.affinity import explain_affinity
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.profile.stored_records import PROFILE, bundle_with_profile, stored_record

pytestmark = pytest.mark.cpu


def falsified(bundle, times, *arguments, **more):
    """The profile of a bundle with other times: a number, or one for each kernel."""
    record = aotc.load(bundle, threads=1).profile("main", *arguments, repeat=1)
    for n, row in enumerate(record["kernels"]):
        row["ns"] = {"cpu": float(times[n] if isinstance(times, list) else times)}
        row.update(more)
    return record


def rows(data):
    """The commands that explain shows."""
    return explain_schedule(open_bundle(data)).rows


def test_measured_times_decide_grain_and_threads():
    x = np.ones((256, 256), np.float32)
    plain = aotc.compile(jnp.tanh, x)
    (row,) = rows(plain)
    assert not row.serial
    (quick,) = rows(aotc.compile(jnp.tanh, x, costs=falsified(plain, 100, x)))
    (slow,) = rows(aotc.compile(jnp.tanh, x, costs=falsified(plain, 1e9, x)))
    assert quick.serial
    assert not slow.serial
    assert slow.claim < row.claim <= quick.claim
    assert (quick.measured, slow.measured) == (100, 1e9)
    assert quick.predicted == slow.predicted == row.predicted


def sorts(*xs):
    return [jnp.sort(xs[0]), *(jnp.sort(x) for x in xs[1:])]


def test_the_command_with_the_longest_measured_time_starts_first():
    """What takes longest is begun first, if that ends sooner."""
    xs = [np.arange(3000 + n, dtype=np.float32) for n in range(5)]
    plain = aotc.compile(sorts, *xs)
    names = [row.kernel for row in rows(plain)]
    assert names == sorted(names)
    times = [1e5, 1e5, 1e5, 1e5, 1e6]
    data = aotc.compile(sorts, *xs, costs=falsified(plain, times, *xs), verify_each=True)
    assert [row.kernel for row in rows(data)] == [names[-1], *names[:-1]]
    for x, y in zip(xs, aotc.load(data, threads=2).invoke("main", *xs)):
        np.testing.assert_array_equal(y, np.sort(x))


T = "tensor<512x512xf32>"
DIAMOND = f"""func.func public @main(%a: {T}, %b: {T}) -> {T} {{
  %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %1 = stablehlo.dot_general %b, %b, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %2 = stablehlo.add %0, %1 : {T}
  return %2 : {T} }}"""


def test_a_device_with_slow_measured_ops_gets_no_ops(monkeypatch):
    """A device on which products were measured to be slow gets none; names of devices go before kinds."""
    a = np.ones((512, 512), np.float32)
    flags = {"devices": {"d0": "cpu", "d1": "cpu"}, "place": "auto"}
    plain = aotc.compile(DIAMOND)

    def places(**more):
        return [r.device for r in explain_affinity(DIAMOND, **flags, **more).rows if r.name == "dot_general"]

    assert sorted(places()) == ["d0", "d1"]
    record = falsified(plain, 1e6, a, a, ns={"d0": 1e9, "d1": 1e6, "cpu": 1e6})
    assert places(costs=record) == ["d1", "d1"]
    assert len(set(places(costs=falsified(plain, 10, a, a)))) == 1  # too little to be placed apart
    tuned = aotc.compile(DIAMOND, costs=record, **flags)
    assert [r.device for r in explain_affinity(tuned).rows if r.name == "dot_general"] == ["d1", "d1"]
    monkeypatch.setattr("aotc.lowering.cost_model.model.digest_of_program", lambda _: "of another program")
    with pytest.warns(AotcWarning, match="the costs that the bundle was compiled with do not count"):
        assert {r.device for r in explain_affinity(tuned).rows if r.name == "dot_general"} == {"d0", "d1"}
    with pytest.raises(StaleCosts):
        places(costs=record)


def repeated(x, y):
    """Four rows read what is computed of one."""
    return jnp.log(jnp.exp(y * jnp.sin(jnp.cos(y))) + 2) * (-x)[None]


def test_an_op_with_a_long_measured_time_is_not_fused_twice():
    """An op that was measured, alone in its kernel, to be dear is not repeated by its reader."""
    x, y = np.ones(4096, np.float32), np.ones((4, 4096), np.float32)
    apart = aotc.compile(repeated, x, y, opt_level=0)
    fused = [row.kernel for row in rows(aotc.compile(repeated, x, y))]
    assert len(fused) == 1
    record = falsified(apart, 1.0, x, y)
    (row,) = (row for row in record["kernels"] if "neg" in row["name"])
    row["ns"]["cpu"] = 1e9
    assert len(rows(aotc.compile(repeated, x, y, costs=record))) == 2


def test_measured_times_of_memory_bound_ops_do_not_change_fusion():
    """Costs as they are leave the ops of a fusion as they were."""
    x, y = np.ones(4096, np.float32), np.ones((4, 4096), np.float32)
    apart = aotc.compile(repeated, x, y, opt_level=0)
    record = falsified(apart, 1.0, x, y)
    module = run_passes(import_model(jax.export.export(jax.jit(repeated))(x, y)), Options(costs=record))
    assert not any("work" in op.attrs for f in module.functions.values() for op in f.body.ops)


def test_a_record_of_another_program_is_refused():
    x = np.ones((64, 64), np.float32)
    record = falsified(aotc.compile(jnp.tanh, x), 100, x)
    with pytest.raises(StaleCosts, match="the costs are stale: they were measured on program"):
        aotc.compile(jnp.sin, x, costs=record)
    with pytest.raises(StaleCosts, match="aotc profile"):
        aotc.compile(jnp.tanh, x[:32], costs=record)


def test_measurements_of_unknown_kernels_are_listed():
    x = np.ones((64, 64), np.float32)
    function = lambda x: jax.nn.softmax(x @ x, 1)
    record = falsified(aotc.compile(function, x, opt_level=0), 1e5, x)
    report = explain_schedule(open_bundle(aotc.compile(function, x, costs=record)))
    fused = {row.kernel for row in report.rows if row.measured is None}
    assert fused
    assert set(report.unknown) <= {row["name"] for row in record["kernels"]}
    assert report.unknown


def test_upgrade_uses_the_costs_of_the_bundle(monkeypatch):
    monkeypatch.setattr("aotc.pipeline.WORTH_SECONDS", 1e9)  # a later compiler would read no bundle of this one
    x = np.ones((256, 256), np.float32)
    plain = aotc.compile(jnp.tanh, x)
    record = falsified(plain, 100, x)
    data = aotc.compile(jnp.tanh, x, costs=record)
    assert aotc.upgrade(data) == data
    assert aotc.upgrade(plain, costs=record) == data
    assert aotc.upgrade(data, costs={}) == plain
    monkeypatch.setattr("aotc.lowering.cost_model.model.digest_of_program", lambda module: "of a later compiler")
    with pytest.warns(AotcWarning, match="the costs that the bundle was compiled with do not count"):
        again = aotc.upgrade(data)
    assert not rows(again)[0].serial
    with pytest.raises(StaleCosts):
        aotc.upgrade(data, costs=record)


def test_explain_shows_the_profile_before_the_costs():
    x = np.ones((256, 256), np.float32)
    record = falsified(aotc.compile(jnp.tanh, x), 100, x)
    data = aotc.compile(jnp.tanh, x, costs=record)
    assert rows(data)[0].measured == 100
    again = bundle_with_profile(open_bundle(data), aotc.load(data, threads=1).profile("main", x, repeat=1))
    assert rows(again)[0].measured == stored_record(open_bundle(again), PROFILE)["kernels"][0]["ns"]["cpu"]


# ---------------------------------------------------------------- orders


def test_critical_paths_are_the_longest_paths_to_the_end():
    assert critical_paths([[], [0], [0], [1, 2]], [1.0, 5.0, 2.0, 1.0]) == [7.0, 6.0, 3.0, 1.0]


def test_makespan_is_the_end_of_the_last_command():
    chain, wide = [[], [0], [1]], [[], [], []]
    assert makespan([0, 1, 2], chain, [1.0, 2.0, 3.0], [1, 1, 1]) == 6
    assert makespan([0, 1, 2], wide, [1.0, 2.0, 3.0], [1, 1, 1]) == 3
    assert makespan([0, 1, 2], wide, [4.0, 4.0, 4.0], [4, 4, 4]) == 3


def test_list_schedules_respect_dependences_and_are_not_slower():
    rng = np.random.default_rng(0)
    for _ in range(100):
        count = int(rng.integers(1, 30))
        before = [sorted({int(p) for p in rng.integers(0, n, min(n, 3))}) if n else [] for n in range(count)]
        times, widths = rng.exponential(1e4, count).tolist(), rng.integers(1, 9, count).tolist()
        order = list_schedule_order(before, times, widths)
        assert sorted(order) == list(range(count))
        place = {n: at for at, n in enumerate(order)}
        assert all(place[p] < place[n] for n in range(count) for p in before[n])
        assert makespan(order, before, times, widths) <= makespan(range(count), before, times, widths)
