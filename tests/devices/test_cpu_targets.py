"""CPU devices of several targets in one module: each kernel is for its device's, numbers are those of one device."""

import json

import numpy as np
import pytest
from lowering.test_devices import FIRST, PROGRAMS, SECOND, T, inputs_of, on_one_device, product, random_program, stages
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.lowering.lower import lower
from aotc.lowering.placement.memory_spaces import spaces_of
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS, common_cpu_target, variant_targets
from aotc.tools.explain.affinity import explain_affinity
from aotc.tools.explain.fusion import explain_fusion
from aotc.tools.explain.memory import explain_memory
from aotc.tools.explain.schedule import explain_schedule
from aotc.tools.lint import lint
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cpu import device as cpu
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.machine import cpu_features

RUNNABLE = [
    name for name, t in TARGETS.items() if name.startswith("cpu:x86-64") and cpu_features().issuperset(t.features)
][:3]
pytestmark = [
    pytest.mark.cpu, pytest.mark.usefixtures("bundles_anew"),
    pytest.mark.skipif(len(RUNNABLE) < 2, reason="this machine runs one CPU target only"),
]  # fmt: skip
OLD, NEW = RUNNABLE[-2:] if len(RUNNABLE) > 1 else ("cpu:x86-64-v2", "cpu:x86-64-v3")
BOTH = {"d0": OLD, "d1": NEW}


def variants(data):
    return open_bundle(data).manifest["variants"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_are_those_of_one_device(name):
    text, devices, moved = PROGRAMS[name]
    data = aotc.compile(text, devices=BOTH, verify_each=True, opt_level=len(name) % 4)
    module = aotc.load(data)
    arrays = inputs_of(module)
    results = module.invoke("main", *arrays, results="device")
    assert [r.device for r in results] == devices
    alone = aotc.load(aotc.compile(on_one_device(text), target=OLD)).invoke("main", *arrays)
    for x, y in zip(results, alone, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)
    assert len(variants(data)[0]["transfers"]) == moved


@pytest.mark.parametrize("seed", range(60, 68))
def test_random_programs(seed):
    text = random_program(np.random.default_rng(seed))
    devices = {f"d{n}": (OLD, NEW)[(n + seed) % 2] for n in range(4) if f'"d{n}"' in text}
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    data = aotc.compile(text, verify_each=True, opt_level=seed % 4, devices=devices)
    expected = interpret(import_model(on_one_device(text)), *arrays)
    for x, y in zip(aotc.load(data).invoke("main", *arrays), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def half(number):
    """One of the two stages as a model of its own."""
    (m, k), n = [((16, 128), 256), ((16, 256), 64)][number]
    return f"""func.func public @main(%x: tensor<{m}x{k}xf32>, %w: tensor<{k}x{n}xf32>) -> tensor<{m}x{n}xf32> {{
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<{m}x{k}xf32>, tensor<{k}x{n}xf32>) -> tensor<{m}x{n}xf32>
      return %0 : tensor<{m}x{n}xf32> }}"""


@pytest.mark.parametrize("devices", [BOTH, {"d0": NEW, "d1": OLD}])
def test_each_stage_is_what_its_target_makes_of_it(devices):
    """Bit for bit the two halves, each compiled alone for its target; the file has the code of both."""
    data = aotc.compile(stages(), devices=devices)
    module = aotc.load(data)
    x, w0, w1 = inputs_of(module)
    first = aotc.load(aotc.compile(half(0), target=devices["d0"]))(x, w0)
    second = aotc.load(aotc.compile(half(1), target=devices["d1"]))(first, w1)
    np.testing.assert_array_equal(module(x, w0, w1), second)
    (variant,) = variants(data)
    assert (variant["kind"], variant["target"]) == ("cpu", "+".join(devices.values()))
    assert [kernel["target"] for kernel in variant["kernels"]] == list(devices.values())
    for name in devices.values():
        assert name.replace(":", "_").replace("-", "_").encode() in data
    assert len(variant["command_buffers"]) == 1


def test_what_each_device_needs_is_listed():
    (variant,) = variants(aotc.compile(stages(), devices=BOTH))
    assert variant["devices"] == {"d0": "cpu", "d1": "cpu"}
    for name, target in BOTH.items():
        assert variant["targets"][name] == {"target": target, "features": list(TARGETS[target].features)}
    assert set(variant["features"]) == {*TARGETS[OLD].features, *TARGETS[NEW].features}


def test_equal_kernels_of_two_targets_are_two():
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %0 = stablehlo.sine %x : {T}
      %1 = stablehlo.sine %w : {T}
      return %0, %1 : {T}, {T} }}"""
    for devices, count in ((BOTH, 2), ({"d0": NEW, "d1": NEW}, 1)):
        data = aotc.compile(text, devices=devices)
        assert len(variants(data)[0]["kernels"]) == count
        x = np.linspace(-3, 3, 64, dtype="f4").reshape(8, 8)
        for got in aotc.load(data).invoke("main", x, x):
            np.testing.assert_allclose(got, np.sin(x), rtol=1e-6)


def two_states(first, second):
    """A loop whose body has a state on each device."""
    return f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %i = stablehlo.constant dense<0> : tensor<i32>
      %n = stablehlo.constant dense<3> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %r:3 = stablehlo.while(%k = %i, %a = %x, %b = %w) : tensor<i32>, {T}, {T}
        cond {{ %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1> }}
        do {{ %k1 = stablehlo.add %k, %one : tensor<i32>
          %s = {first}
          %t = {second}
          stablehlo.return %k1, %s, %t : tensor<i32>, {T}, {T} }}
      return %r#1, %r#2 : {T}, {T} }}"""


@pytest.mark.parametrize(("devices", "several"), [(BOTH, True), ({"d0": NEW, "d1": NEW}, False)])
def test_a_loop_of_kernels_for_two_targets_is_no_kernel(devices, several):
    text = two_states(f"stablehlo.sine %a : {T}", f"stablehlo.cosine %b : {T}")
    data = aotc.compile(text, devices=devices, verify_each=True)
    assert any("loop" in kernel["name"] for kernel in variants(data)[0]["kernels"]) != several
    x = np.linspace(-3, 3, 64, dtype="f4").reshape(8, 8)
    for got, f in zip(aotc.load(data).invoke("main", x, x), (np.sin, np.cos), strict=True):
        np.testing.assert_allclose(got, f(f(f(x))), rtol=1e-5)


def test_a_small_loop_on_one_of_them_is_for_its_target():
    text = two_states(f"stablehlo.sine %a : {T}", f"stablehlo.cosine %b : {T}").replace(SECOND, FIRST)
    text = text.replace(
        "return %r#1, %r#2 :",
        f"%z = stablehlo.custom_call @aotc.transfer(%r#1) {{aotc.to = "
        f'"d1"}} : ({T}) -> {T} %u = stablehlo.exponential %z : {T} return %u, %r#2 :',
    )
    data = aotc.compile(text, devices={"d0": NEW, "d1": OLD}, verify_each=True)
    targets = {k["name"].partition("_")[2][:4]: k["target"] for k in variants(data)[0]["kernels"]}
    assert (targets["loop"], len(targets)) == (NEW, 2)


def test_a_machine_without_a_feature_is_told_which_device_needs_it(monkeypatch):
    data = aotc.compile(stages(), devices=BOTH)
    missing = sorted(set(TARGETS[NEW].features) - set(TARGETS[OLD].features))
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(TARGETS[OLD].features))
    with pytest.raises(BundleError) as caught:
        aotc.load(data)
    for part in (f"device 'd1' is {NEW}", f"this CPU lacks {', '.join(missing)}", "--device NAME=TARGET"):
        assert part in str(caught.value)
    assert "'d0'" not in str(caught.value)


def test_other_architectures_are_refused():
    with pytest.raises(CompileError, match=f"d0 is {OLD}, d1 is cpu:aarch64") as caught:
        aotc.compile(stages(), devices={"d0": OLD, "d1": "cpu:aarch64"})
    assert "--device NAME=TARGET" in str(caught.value)


def test_several_targets_are_several_variants():
    """Devices that are not named are of each ``--target``; the machine takes the best that it runs."""
    data = aotc.compile(stages(), target=f"{OLD},{NEW}", devices={"d1": OLD})
    assert [v["target"] for v in variants(data)] == [OLD, f"{NEW}+{OLD}"]
    module = aotc.load(data)
    assert module.stats()["target"] == f"{NEW}+{OLD}"
    x, w0, w1 = inputs_of(module)
    alone = aotc.load(aotc.compile(on_one_device(stages()), target=OLD))(x, w0, w1)
    np.testing.assert_allclose(module(x, w0, w1), alone, rtol=1e-4, atol=1e-4)
    assert aotc.upgrade(data) == data


def test_a_variant_for_the_same_targets_is_left_out():
    data = aotc.compile(stages(), target=f"{OLD},{NEW}", devices=BOTH)
    assert [v["target"] for v in variants(data)] == [f"{OLD}+{NEW}"]
    assert aotc.upgrade(data) == data


def test_what_stands_for_targets():
    old, new = TARGETS["cpu:x86-64-v2"], TARGETS["cpu:x86-64-v4"]
    joint = common_cpu_target([new, old, new])
    assert (joint.name, joint.kind, joint.cpu) == ("cpu:x86-64-v4+cpu:x86-64-v2", "cpu", old.cpu)
    assert set(joint.features) == {*old.features, *new.features}
    assert common_cpu_target([new, new]) is new
    names = [t.name for t in variant_targets((old, new), {"d1": "cuda:sm_90"})]
    assert names == ["cpu:x86-64-v2+cuda:sm_90a", "cpu:x86-64-v4+cuda:sm_90a"]


def test_the_resource_model_is_that_of_the_device():
    """Tiles are as wide as the vectors of the target of their device."""
    options = Options(devices={"d0": "cpu:x86-64-v2", "d1": "cpu:x86-64-v4"}, target="cpu:x86-64-v3")
    (target,) = variant_targets((TARGETS["cpu:x86-64-v3"],), options.devices)
    module = run_passes(import_model(stages()), options)
    variant = lower(module, target, options)
    assert [t.vector_bytes for t in variant.targets] == [16, 64]
    (space,) = spaces_of(module, target)
    assert space.target.vector_bytes == 16
    report = explain_fusion(stages(), devices=BOTH)
    assert [(r.device, r.target) for r in report.regions] == list(BOTH.items())
    assert report.devices == BOTH


def test_placing_by_cost_knows_the_targets():
    """A chain of products that nobody places goes where vectors are widest."""
    t = "tensor<512x512xf32>"
    steps = [product(f"%v{n}", "%b").replace(T, t) for n in range(3)]
    body = "\n".join(f"%v{n + 1} = {step}" for n, step in enumerate(steps))
    text = f"func.func public @main(%v0: {t}, %b: {t}) -> {t} {{ {body} return %v3 : {t} }}"
    for devices in ({"d0": "cpu:x86-64-v2", "d1": "cpu:x86-64-v4"}, {"d0": "cpu:x86-64-v4", "d1": "cpu:x86-64-v2"}):
        best = next(name for name, target in devices.items() if target.endswith("v4"))
        rows = [r for r in explain_affinity(text, devices=devices, place="auto").rows if r.name == "dot_general"]
        assert {row.device for row in rows} == {best}
        assert all("ends first" in row.reason for row in rows)


def test_profiles_tell_the_targets_apart():
    data = aotc.compile(stages(), devices=BOTH)
    record = aotc.load(data).profile("main", *inputs_of(aotc.load(data)), repeat=1)
    assert [list(row["ns"]) for row in record["kernels"]] == [[OLD], [NEW]]
    opened = open_bundle(aotc.compile(stages(), devices=BOTH, costs=record))
    rows = explain_schedule(opened).rows
    assert [row.measured for row in rows] == [next(iter(row["ns"].values())) for row in record["kernels"]]
    assert [row.device for row in rows] == [OLD, NEW]


def test_tools_say_which_target_each_device_has(tmp_path):
    from aotc_cli.main import app

    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile(stages(), devices=BOTH))
    opened = open_bundle(str(path))
    assert explain_schedule(opened).devices == explain_memory(opened).devices == BOTH
    assert explain_affinity(stages(), devices=BOTH).targets == BOTH
    assert lint(stages(), devices=BOTH)[0].target == f"{OLD}+{NEW}"
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(path)]).output.split())
    for part in (f"d0: {OLD} (cpu:0), d1: {NEW} (cpu:1)", f"d1 needs {' '.join(TARGETS[NEW].features)}"):
        assert part in shown
    (variant,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)["variants"]
    assert variant["devices"]["d1"]["features"] == list(TARGETS[NEW].features)
    for subject in ("schedule", "memory", "fusion", "affinity"):
        output = " ".join(CliRunner().invoke(app, ["explain", subject, str(path)]).output.split())
        assert f"d0 is {OLD}, d1 is {NEW}" in output
