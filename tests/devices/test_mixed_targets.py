"""CPU devices of several targets beside a GPU, and bundles for several CPU targets with one."""

import numpy as np
import pytest
from devices.mixes import alone, run_everywhere, simulate
from devices.test_cpu_targets import NEW, OLD, RUNNABLE
from devices.test_mixed_programs import small_stages
from lowering.test_devices import FIRST, T, on_one_device, product, random_program, to
from support.small_models import array
from vmfb.simulated_gpu import install

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.targets import TARGETS
from aotc.tools.explain.schedule import explain_schedule
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cpu import device as cpu
from aotc.vmfb.errors import BundleError

pytest.importorskip("numba_cuda")
pytestmark = [
    pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew"),
    pytest.mark.skipif(len(RUNNABLE) < 2, reason="this machine runs one CPU target only"),
]  # fmt: skip
GPU = "cuda:sm_90a"


def three_stages():
    body = "".join(
        f"""%t{n} = {to(f"d{n}", f"%b{n - 1}" if n else "%x")}
        %a{n} = {product(f"%t{n}", f"%w{n}")}
        %b{n} = stablehlo.sine %a{n} : {T}
        """
        for n in range(3)
    )
    weights = ", ".join(f'%w{n}: {T} {{aotc.affinity = "d{n}"}}' for n in range(3))
    return f"func.func public @main(%x: {T} {FIRST}, {weights}) -> {T} {{ {body} return %b2 : {T} }}"


@pytest.mark.parametrize("devices", [(OLD, NEW, GPU), (GPU, NEW, OLD), (NEW, GPU, OLD)])
def test_two_cpu_targets_and_a_gpu(devices, monkeypatch):
    named = {f"d{n}": target for n, target in enumerate(devices)}
    module = simulate(monkeypatch, three_stages(), named, verify_each=True)
    (variant,) = module._bundle.manifest["variants"]
    host = "+".join(target for target in devices if target != GPU)
    assert [part["target"] for part in variant["parts"]] == [host, GPU]
    assert {name: row["target"] for name, row in variant["targets"].items()} == named
    assert list(dict.fromkeys(k["target"] for k in variant["kernels"] if "target" in k)) == host.split("+")
    assert {row.device for row in explain_schedule(module._bundle).rows if "copy" not in row.kernel} == {
        *host.split("+"), next(name for name, target in named.items() if target == GPU),
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(70, 74))
def test_random_programs(seed, monkeypatch):
    text = random_program(np.random.default_rng(seed))
    kinds = [OLD, GPU, NEW, OLD]
    devices = {f"d{n}": kinds[(n + seed) % 4] for n in range(4) if f'"d{n}"' in text}
    data = aotc.compile(text, verify_each=True, opt_level=seed % 4, devices=devices)
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    run_everywhere(monkeypatch, data, arrays, interpret(import_model(on_one_device(text)), *arrays))


def test_a_bundle_for_several_cpu_targets_and_a_gpu(monkeypatch):
    """The machine takes the variant with the most of its features; a lesser one takes another."""
    text = small_stages()
    data = aotc.compile(text, target=f"{OLD},{NEW}", devices={"d1": GPU})
    assert [v["target"] for v in open_bundle(data).manifest["variants"]] == [f"{OLD}+{GPU}", f"{NEW}+{GPU}"]
    install(monkeypatch, data)
    x, w0, w1 = array(2, 12), array(12, 20, seed=1), array(20, 6, seed=2)
    want = alone(text, x, w0, w1)[0]
    best = aotc.load(data)
    assert best.stats()["target"] == f"{NEW}+{GPU}"
    np.testing.assert_allclose(np.asarray(best(x, w0, w1)), want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(TARGETS[OLD].features))
    lesser = aotc.load(data)
    assert lesser.stats()["target"] == f"{OLD}+{GPU}"
    np.testing.assert_allclose(np.asarray(lesser(x, w0, w1)), want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(cpu, "cpu_features", frozenset)
    with pytest.raises(BundleError, match=f"device 'd0' is {OLD}, and this CPU lacks"):
        aotc.load(data)
    monkeypatch.undo()
    assert aotc.upgrade(data) == data


def test_variants_have_one_signature():
    """Costs may place a result elsewhere for another target: that is said, for all variants have one signature."""
    t = "tensor<512x512xf32>"
    text = f"""func.func public @main(%x: {t} {FIRST}, %w: {t}) -> {t} {{
      %0 = {product("%x", "%w").replace(T, t)}
      return %0 : {t} }}"""
    with pytest.raises(CompileError, match=r"an argument or result of @main is on d1 for .*, and on d0 for"):
        aotc.compile(
            text, target="cpu:x86-64-v2,cpu:x86-64-v4", devices={"d1": "cpu:x86-64-v3"}, place="auto", source=False,
        )  # fmt: skip
