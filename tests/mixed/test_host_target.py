"""Which CPU target a machine gets, which code of a bundle it takes, what it refuses: with features that are made up."""

import ml_dtypes
import numpy as np
import pytest

import aotc
from aotc import targets
from aotc.diagnostics import CompileError
from aotc.targets import TARGETS, host
from aotc.vmfb.devices import cpu
from aotc.vmfb.errors import BundleError

pytestmark = pytest.mark.cpu

V3, V4, VNNI, BF16 = (set(TARGETS[f"cpu:x86-64-{name}"].features) for name in ("v3", "v4", "v4-vnni", "v4-bf16"))
MACHINES = {  # by what /proc/cpuinfo says
    "haswell": (V3, "cpu:x86-64-v3"),
    "skylake-x": (V4, "cpu:x86-64-v4"),
    "ice lake": (VNNI, "cpu:x86-64-v4-vnni"),
    "zen 4, zen 5": (BF16, "cpu:x86-64-v4-bf16"),
    "sapphire rapids": (BF16 | {"amx_tile", "amx_int8", "amx_bf16"}, "cpu:x86-64-v4-vnni"),
    "without one of them": (BF16 - {"avx512_vnni"}, "cpu:x86-64-v4"),
}
TEXT = """func.func public @main(%x: tensor<8x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<8x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x64xbf16>, tensor<64x64xbf16>) -> tensor<8x64xf32>
  return %0 : tensor<8x64xf32> }"""


@pytest.fixture
def machine(monkeypatch):
    """Say what the machine's features are."""

    def become(have):
        monkeypatch.setattr(targets, "cpu_features", lambda: frozenset(have))
        monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(have))
        monkeypatch.setattr(targets.platform, "machine", lambda: "x86_64")

    return become


@pytest.mark.parametrize("name", MACHINES)
def test_the_default_is_the_fastest_that_runs(name, machine):
    have, target = MACHINES[name]
    machine(have)
    assert host().name == target


def test_a_machine_that_runs_none(machine):
    machine({"sse2"})
    with pytest.raises(CompileError, match="no CPU target fits this machine"):
        host()


def test_the_unit_is_switched_on_for_its_target_only():
    off = {name for name, t in TARGETS.items() if t.kind == "cpu" and "-avx512bf16" in t.llvm_features.split(",")}
    assert off == {"cpu:x86-64-v4", "cpu:x86-64-v4-vnni"}
    assert [t.name for t in TARGETS.values() if "bf16" in t.units] == ["cpu:x86-64-v4-bf16"]
    assert TARGETS["cpu:x86-64-v4-vnni"].units == {"i8"}
    assert not TARGETS["cpu:x86-64-v4"].units | TARGETS["cpu:aarch64"].units


def test_a_bundle_of_several_takes_the_best_that_runs(machine):
    names = ("cpu:x86-64-v3", "cpu:x86-64-v4", "cpu:x86-64-v4-bf16")
    data = aotc.compile(TEXT, target=",".join(names))
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((8, 64), (64, 64)))
    exact = x.astype("f8") @ w.astype("f8")
    runs = cpu.cpu_features()
    for have, name in zip((V3, VNNI, BF16), names, strict=True):
        machine(have)
        if runs.issuperset(TARGETS[name].features):
            module = aotc.load(data)
            assert module.stats()["target"] == name
            np.testing.assert_allclose(module(x, w), exact, rtol=1e-4, atol=1e-4)


def test_a_machine_without_the_unit_refuses(machine):
    data = aotc.compile(TEXT, target="cpu:x86-64-v4-bf16")
    machine(VNNI)
    with pytest.raises(BundleError, match="this CPU lacks avx512_bf16"):
        aotc.load(data)
