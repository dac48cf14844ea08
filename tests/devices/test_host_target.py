"""Which CPU target a machine gets, which code of a bundle it takes, what it refuses: with features that are made up."""

import ml_dtypes
import numpy as np
import pytest

import aotc
from aotc import targets
from aotc.diagnostics import CompileError
from aotc.targets import PORTABLE, TARGETS, host_target, resolve_targets
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import choose_variant
from aotc.vmfb.devices.cpu import device as cpu
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host import machine as vmfb_machine

pytestmark = pytest.mark.cpu

NAMES = ("v3", "v3-vnni", "v4", "v4-vnni", "v4-bf16", "amx")
V3, SHORT, V4, VNNI, BF16, AMX = (set(TARGETS[f"cpu:x86-64-{name}"].features) for name in NAMES)
MACHINES = {  # by what /proc/cpuinfo says
    "haswell": (V3, "cpu:x86-64-v3"),
    "alder lake": (SHORT, "cpu:x86-64-v3-vnni"),
    "skylake-x": (V4, "cpu:x86-64-v4"),
    "ice lake": (VNNI, "cpu:x86-64-v4-vnni"),
    "zen 4": (BF16, "cpu:x86-64-v4-bf16"),
    "zen 5": (BF16 | SHORT, "cpu:x86-64-v4-bf16"),
    "no vectors of 512 bits but one": (SHORT | {"avx512f"}, "cpu:x86-64-v3-vnni"),
    "sapphire rapids": (AMX, "cpu:x86-64-amx"),
    "a matrix unit of another kind": (AMX - {"amx_int8"}, "cpu:x86-64-v4-vnni"),
    "without one of them": (BF16 - {"avx512_vnni"}, "cpu:x86-64-v4"),
}
PAIRS = {"asimd", "asimddp", "i8mm", "bf16"}
ARM = {  # AArch64's, by what /proc/cpuinfo says
    "cortex-a72": ({"fp", "asimd", "evtstrm", "aes"}, "cpu:aarch64"),
    "neoverse n1": ({"fp", "asimd", "asimdhp", "atomics", "asimddp"}, "cpu:aarch64-dotprod"),
    "neoverse n2": ({"fp", *PAIRS, "sve", "sve128", "svei8mm", "svebf16"}, "cpu:aarch64-bf16"),
    "neoverse v1": ({"fp", *PAIRS, "sve", "sve256", "svei8mm", "svebf16"}, "cpu:aarch64-sve256"),
    "a64fx": ({"fp", "asimd", "sve", "sve512"}, "cpu:aarch64-sve512"),
    "units and 512 bits": ({"fp", *PAIRS, "sve", "sve512", "svei8mm", "svebf16"}, "cpu:aarch64-sve512"),
    "an a64fx with 256 bits": ({"fp", "asimd", "sve", "sve256"}, "cpu:aarch64"),
    "a length of which there is no target": ({"fp", *PAIRS, "sve", "sve1024", "svebf16"}, "cpu:aarch64-bf16"),
    "a length that nobody knows": ({"fp", "asimd", "asimddp", "sve", "sve0"}, "cpu:aarch64-dotprod"),
    "without one of them": ({"fp", "asimd", "asimddp", "i8mm"}, "cpu:aarch64-dotprod"),
}
ALL = {name: ("x86_64", *row) for name, row in MACHINES.items()} | {n: ("aarch64", *row) for n, row in ARM.items()}
TEXT = """func.func public @main(%x: tensor<8x64xbf16>, %w: tensor<64x64xbf16>) -> tensor<8x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x64xbf16>, tensor<64x64xbf16>) -> tensor<8x64xf32>
  return %0 : tensor<8x64xf32> }"""


@pytest.fixture
def machine(monkeypatch):
    """Say what the machine's features are."""

    def become(have, permitted=True, architecture="x86_64"):
        for module in (targets, vmfb_machine):
            monkeypatch.setattr(module, "request_amx_tiles", lambda: permitted)
        monkeypatch.setattr(targets, "cpu_features", lambda: frozenset(have))
        monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(have))
        monkeypatch.setattr(targets.platform, "machine", lambda: architecture)

    return become


@pytest.mark.parametrize("name", ALL)
def test_the_default_is_the_fastest_that_runs(name, machine):
    architecture, have, target = ALL[name]
    machine(have, architecture=architecture)
    assert host_target().name == target


@pytest.fixture(scope="module")
def portable():
    """A bundle for all CPUs."""
    return aotc.compile(TEXT, target=PORTABLE)


@pytest.mark.parametrize("name", ALL)
def test_a_portable_bundle_has_code_for_every_machine(name, machine, portable):
    """The same as each machine compiles for itself, whichever compiled the bundle."""
    architecture, have, target = ALL[name]
    machine(have, architecture=architecture)
    variant, _, _ = choose_variant(open_bundle(portable), None)
    assert variant["target"] == target


def test_the_oldest_machine_of_a_portable_bundle(machine, portable):
    have = set(TARGETS["cpu:x86-64-v2"].features)
    machine(have)
    assert choose_variant(open_bundle(portable), None)[0]["target"] == "cpu:x86-64-v2"
    machine(have - {"popcnt"})
    with pytest.raises(BundleError, match="this CPU lacks"):
        choose_variant(open_bundle(portable), None)


def test_a_portable_bundle_runs_here(portable):
    assert [t.name for t in resolve_targets(PORTABLE)] == [n for n, t in TARGETS.items() if t.kind == "cpu"]
    module = aotc.load(portable)
    assert module.stats()["target"] == host_target().name
    x, w = np.ones((8, 64), ml_dtypes.bfloat16), np.full((64, 64), 0.5, ml_dtypes.bfloat16)
    np.testing.assert_array_equal(module(x, w), np.full((8, 64), 32, "f4"))


def test_equal_weights_are_in_a_portable_bundle_once():
    """Panels of one width are the same for all CPUs with such vectors: those of x86's and of AArch64's."""
    weights = ", ".join(str(n % 251 / 8) for n in range(256 * 256))
    text = f"""func.func public @main(%x: tensor<64x256xf32>) -> tensor<64x256xf32> {{
      %w = stablehlo.constant dense<[{weights}]> : tensor<65536xf32>
      %v = stablehlo.reshape %w : (tensor<65536xf32>) -> tensor<256x256xf32>
      %0 = stablehlo.dot_general %x, %v, contracting_dims = [1] x [0]
        : (tensor<64x256xf32>, tensor<256x256xf32>) -> tensor<64x256xf32>
      return %0 : tensor<64x256xf32> }}"""
    sizes = [len(aotc.compile(text, target=name, source=False)) for name in ("cpu:x86-64-v3", PORTABLE)]
    assert sizes[1] < sizes[0] + 3.5 * (256 * 256 * 4)


def test_a_system_that_refuses_tile_registers(machine):
    """Then the unit for pairs, which is slow on such a CPU, is not the next one."""
    machine(AMX, permitted=False)
    assert host_target().name == "cpu:x86-64-v4-vnni"


def test_a_machine_that_runs_none(machine):
    machine({"sse2"})
    with pytest.raises(CompileError, match="no CPU target fits this machine"):
        host_target()


def test_the_unit_is_switched_on_for_its_target_only():
    off = {name for name, t in TARGETS.items() if t.kind == "cpu" and "-avx512bf16" in t.llvm_features.split(",")}
    assert off == {"cpu:x86-64-v4", "cpu:x86-64-v4-vnni"}
    pairs = ["cpu:x86-64-v4-bf16", "cpu:x86-64-amx", "cpu:aarch64-bf16", "cpu:aarch64-sve256"]
    assert [t.name for t in TARGETS.values() if "bf16" in t.units] == pairs
    for unit in ("amx-tile", "amx-bf16", "amx-int8"):
        off = {n for n, t in TARGETS.items() if f"-{unit}" in t.llvm_features.split(",")}
        assert off == {"cpu:x86-64-v4", "cpu:x86-64-v4-vnni", "cpu:x86-64-v4-bf16"}
    assert [t.name for t in TARGETS.values() if t.matrices] == ["cpu:x86-64-amx"]
    assert TARGETS["cpu:x86-64-amx"].matrices == {"bf16", "i8"}
    assert TARGETS["cpu:x86-64-v4-vnni"].units == TARGETS["cpu:x86-64-v3-vnni"].units == {"i8"}
    on = {name for name, t in TARGETS.items() if "+avxvnni" in t.llvm_features.split(",")}
    assert on == {"cpu:x86-64-v3-vnni"}
    assert not TARGETS["cpu:x86-64-v3"].units
    assert not TARGETS["cpu:x86-64-v4"].units | TARGETS["cpu:aarch64"].units
    assert TARGETS["cpu:aarch64-dotprod"].units == {"i8"}
    assert TARGETS["cpu:aarch64-bf16"].units == {"i8", "bf16"}
    assert not TARGETS["cpu:aarch64"].llvm_features
    assert TARGETS["cpu:aarch64-bf16"].llvm_features == "+dotprod,+i8mm,+bf16"
    assert TARGETS["cpu:aarch64-sve256"].units == {"i8", "bf16"}
    assert TARGETS["cpu:aarch64-sve256"].llvm_features == "+sve,+dotprod,+i8mm,+bf16"
    assert TARGETS["cpu:aarch64-sve512"].units == {"i8"}  # all that have SVE multiply quads
    assert {n: t.sve_length for n, t in TARGETS.items() if t.sve_length} == {
        "cpu:aarch64-sve256": 2, "cpu:aarch64-sve512": 4,
    }  # fmt: skip


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


EVERY = tuple(f"cpu:x86-64-{name}" for name in NAMES)
CHOICES = [  # what the machine has, which variants the bundle has, is AMX permitted, which one is taken
    (AMX, EVERY, True, "amx"),
    (AMX, EVERY, False, "v4-vnni"),
    (AMX, ("cpu:x86-64-v3", "cpu:x86-64-amx"), False, "v3"),
    (AMX, ("cpu:x86-64-v3", "cpu:x86-64-v4-bf16"), True, "v4-bf16"),
    (AMX, ("cpu:x86-64-v4", "cpu:x86-64-v4-bf16"), True, "v4"),
    (AMX - {"amx_int8"}, EVERY, True, "v4-vnni"),
    (BF16, EVERY, True, "v4-bf16"),
    (VNNI, EVERY, True, "v4-vnni"),
    (V3, EVERY, True, "v3"),
    (SHORT, EVERY, True, "v3-vnni"),
    (V4 | SHORT, EVERY, True, "v4"),
    (V4 | SHORT, ("cpu:x86-64-v3", "cpu:x86-64-v3-vnni"), True, "v3-vnni"),
]


@pytest.fixture(scope="module")
def bundles():
    """Bundles of several targets, by their names."""
    found = {}

    def of(names):
        if names not in found:
            found[names] = open_bundle(aotc.compile(TEXT, target=",".join(names)))
        return found[names]

    return of


@pytest.mark.parametrize(("have", "names", "permitted", "taken"), CHOICES)
@pytest.mark.parametrize("transposed", [False, True])
def test_which_variant_a_machine_takes(have, names, permitted, taken, transposed, machine, bundles):
    """Whatever their order."""
    machine(have, permitted)
    variant, _, _ = choose_variant(bundles(names[::-1] if transposed else names), None)
    assert variant["target"] == f"cpu:x86-64-{taken}"


def test_a_refusal_is_said_if_nothing_else_runs(machine, bundles):
    machine(AMX, permitted=False)
    with pytest.raises(BundleError, match="the system refuses tile registers"):
        choose_variant(bundles(("cpu:x86-64-amx",)), None)


def test_the_permission_is_asked_for_once_and_only_with_the_unit(machine, bundles, monkeypatch):
    """A machine without the unit is not asked; the answer of this one is kept."""
    asked = []
    machine(BF16)
    monkeypatch.setattr(vmfb_machine, "request_amx_tiles", lambda: asked.append(1) or True)
    choose_variant(bundles(EVERY), None)
    assert not asked


def test_this_system_answers():
    """With or without the unit: a number, and no crash; where there is no such system call the answer is no."""
    assert vmfb_machine.request_amx_tiles() in (True, False)
    assert vmfb_machine.request_amx_tiles() is vmfb_machine.request_amx_tiles()
    assert vmfb_machine.request_amx_tiles() <= ("amx_tile" in vmfb_machine.cpu_features())


@pytest.mark.parametrize(("platform", "machine_name"), [("darwin", "x86_64"), ("linux", "aarch64")])
def test_other_systems_are_not_asked(platform, machine_name, monkeypatch):
    monkeypatch.setattr(vmfb_machine.sys, "platform", platform)
    monkeypatch.setattr(vmfb_machine.platform, "machine", lambda: machine_name)
    monkeypatch.setattr(vmfb_machine.ctypes, "CDLL", None)
    assert vmfb_machine.request_amx_tiles.__wrapped__() is False
