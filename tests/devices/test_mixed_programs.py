"""Programs for the CPU and GPUs together: numbers are those of one device, whatever order GPUs work in."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, alone, run_everywhere, simulate
from jax.experimental import checkify
from lowering.test_devices import (
    ASSERTION,
    FIRST,
    PROGRAMS,
    SECOND,
    T,
    loop,
    on_one_device,
    product,
    random_program,
    stages,
    to,
)
from support.small_models import array
from typer.testing import CliRunner
from vmfb.simulated_gpu import install

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.vmfb import custom_calls
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.errors import BundleError, CallError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]

SMALL = [name for name, row in PROGRAMS.items() if "128" not in row[0]]
"""Programs that the simulated GPU does not take long for."""


def small_stages(**options):
    """The two products of S1, small."""
    return stages(**options).replace("16x", "2x").replace("128", "12").replace("256", "20").replace("64", "6")


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("name", SMALL)
def test_results_are_those_of_one_device(name, halves, monkeypatch):
    text, _, moved = PROGRAMS[name]
    module = simulate(monkeypatch, text, HALVES[halves], verify_each=True, opt_level=len(name) % 4)
    assert len(module._bundle.manifest["variants"][0]["transfers"]) == moved


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("result", ["", '{aotc.affinity = "d0"}'])
@pytest.mark.parametrize("transfer", [True, False])
def test_the_product_and_the_one_after_it(result, transfer, halves, monkeypatch):
    """S1: the result is on the device that makes it; a transfer is the model's, or is found."""
    module = simulate(monkeypatch, small_stages(result=result, transfer=transfer), HALVES[halves], verify_each=True)
    manifest = module._bundle.manifest
    (variant,) = manifest["variants"]
    assert [(t["from"], t["to"], t["bytes"]) for t in variant["transfers"]] == [
        ("d0", "d1", 4 * 2 * 20), *([("d1", "d0", 4 * 2 * 6)] if result else []),
    ]  # fmt: skip
    assert manifest["functions"]["main"]["results"][0]["device"] == ("d0" if result else "d1")
    kinds = {device: target.partition(":")[0] for device, target in HALVES[halves].items()}
    assert (variant["kind"], variant["devices"]) == ("mix", kinds)
    assert variant["target"].count("cuda:sm_90") == 1
    assert sum(part["count"] for part in variant["parts"]) == len(variant["kernels"]) == 2


@pytest.mark.parametrize("count", [3, 5, 8])
def test_stages_on_as_many_devices(count, monkeypatch):
    body = "".join(
        f"%a{n} = {product(f'%b{n - 1}' if n else '%x', f'%w{n}')}\n%b{n} = stablehlo.sine %a{n} : {T}\n"
        for n in range(count)
    )
    weights = ", ".join(f'%w{n}: {T} {{aotc.affinity = "d{n}"}}' for n in range(count))
    text = f"func.func public @main(%x: {T} {FIRST}, {weights}) -> {T} {{ {body} return %b{count - 1} : {T} }}"
    devices = {f"d{n}": "cpu" if n % 3 == 0 else "cuda:sm_90" for n in range(count)}
    module = simulate(monkeypatch, text, devices, verify_each=True)
    gpus = [place for place in module.devices.values() if place.startswith("cuda")]
    assert gpus == [f"cuda:{n % 2}" for n in range(len(gpus))]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed, monkeypatch):
    """Loops and branches over the CPU and GPUs, beside the reference."""
    text = random_program(np.random.default_rng(seed))
    kinds = ["cpu", "cuda:sm_90", "cuda:sm_90", "cpu"]
    devices = {f"d{n}": kinds[(n + seed) % 4] for n in range(4) if f'"d{n}"' in text}
    data = aotc.compile(text, verify_each=True, opt_level=seed % 4, devices=devices)
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    run_everywhere(monkeypatch, data, arrays, interpret(import_model(on_one_device(text)), *arrays))


@pytest.mark.parametrize("halves", HALVES)
def test_both_devices_in_one_loop_without_a_transfer(halves, monkeypatch):
    """Two states, each on its device: neither a kernel of the whole loop nor one memory."""
    one = product("%a", "%a")
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %i = stablehlo.constant dense<0> : tensor<i32>
      %n = stablehlo.constant dense<3> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %r:3 = stablehlo.while(%k = %i, %a = %x, %b = %w) : tensor<i32>, {T}, {T}
        cond {{ %c = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1> }}
        do {{ %k1 = stablehlo.add %k, %one : tensor<i32>
          %p = {one}
          %s = stablehlo.sine %p : {T}
          %t = stablehlo.cosine %b : {T}
          stablehlo.return %k1, %s, %t : tensor<i32>, {T}, {T} }}
      return %r#1, %r#2 : {T}, {T} }}"""
    simulate(monkeypatch, text, HALVES[halves], verify_each=True)


@pytest.mark.parametrize("halves", HALVES)
def test_sizes_that_only_a_call_knows(halves, monkeypatch):
    text = """func.func public @main(%x: tensor<?x4xf32> {aotc.affinity = "d0"},
        %w: tensor<4x3xf32> {aotc.affinity = "d1"}) -> tensor<?x3xf32> {
      %s = stablehlo.sine %x : tensor<?x4xf32>
      %0 = stablehlo.custom_call @aotc.transfer(%s) {aotc.to = "d1"} : (tensor<?x4xf32>) -> tensor<?x4xf32>
      %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0]
        : (tensor<?x4xf32>, tensor<4x3xf32>) -> tensor<?x3xf32>
      return %1 : tensor<?x3xf32> }"""
    data = aotc.compile(text, verify_each=True, devices=HALVES[halves])
    for size in (3, 7, 0, 3):
        x, w = array(size, 4), array(4, 3, seed=1)
        run_everywhere(monkeypatch, data, [x, w], [np.sin(x) @ w])
    (transfer,) = open_bundle(data).manifest["variants"][0]["transfers"]
    assert "16*" in transfer["bytes"]


@pytest.mark.parametrize("halves", HALVES)
def test_a_check_on_another_device_comes_first(halves, monkeypatch):
    x = np.ones((8, 8), "float32")
    data = aotc.compile(ASSERTION, verify_each=True, devices=HALVES[halves])
    module = run_everywhere(monkeypatch, data, [x, x], [np.sin(x), np.sin(x) + x])
    out = [np.zeros((8, 8), "float32") for _ in range(2)]
    with pytest.raises(CallError, match="w sums to nothing"):
        module.invoke("main", x, -x, out=out)
    assert not any(o.any() for o in out)
    np.testing.assert_allclose(module.invoke("main", x, x, results="numpy")[1], np.sin(x) + x, rtol=1e-6)


def test_a_check_with_numbers(monkeypatch):
    def roots(x, w):
        checkify.check(jnp.all(x >= 0), "negative: {low:.2f}", low=x.min())
        return jnp.sqrt(x) @ w

    x, w = np.arange(4, dtype="f4"), np.eye(4, dtype="f4")
    data = aotc.compile(roots, x, w, devices={"d1": "cuda:sm_90"}, default_device="d1")
    install(monkeypatch, data)
    with pytest.raises(CallError, match=r"negative: -1\.00"):
        aotc.load(data)(x - 1, w)


COMPUTED = f"""func.func public @main(%x: tensor<8xf32> {FIRST}, %n: tensor<i32> {SECOND}) -> tensor<?xf32> {{
  %0 = stablehlo.sine %x : tensor<8xf32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %m = stablehlo.add %n, %one : tensor<i32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %s = stablehlo.reshape %m : (tensor<i32>) -> tensor<1xi32>
  %1 = {to("d1", "%0").replace(T, "tensor<8xf32>")}
  %b = stablehlo.constant dense<1.5> : tensor<f32>
  %2 = stablehlo.dynamic_broadcast_in_dim %b, %s, dims = [] : (tensor<f32>, tensor<1xi32>) -> tensor<?xf32>
  %3 = "stablehlo.concatenate"(%1, %2) {{dimension = 0 : i64}} : (tensor<8xf32>, tensor<?xf32>) -> tensor<?xf32>
  return %3 : tensor<?xf32> }}"""


@pytest.mark.parametrize("halves", HALVES)
def test_sizes_that_are_values(halves, monkeypatch):
    """The host program reads them from whatever memory they are in."""
    data = aotc.compile(COMPUTED, verify_each=True, devices=HALVES[halves])
    x = array(8)
    for n in (0, 3):
        want = np.concatenate([np.sin(x), np.full(n + 1, 1.5, "f4")])
        run_everywhere(monkeypatch, data, [x, np.int32(n)], [want])


def test_constants_are_where_they_are_read(monkeypatch):
    """Each GPU holds what its kernels read; the file holds all once."""
    c = ", ".join(f"{n}.0" for n in range(64))
    e = ", ".join(f"{n}.5" for n in range(64))
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %c = stablehlo.constant dense<[{c}]> : tensor<64xf32>
      %e = stablehlo.constant dense<[{e}]> : tensor<64xf32>
      %k = stablehlo.reshape %c : (tensor<64xf32>) -> {T}
      %m = stablehlo.reshape %e : (tensor<64xf32>) -> {T}
      %0 = stablehlo.multiply %x, %k : {T}
      %1 = stablehlo.multiply %w, %k : {T}
      %2 = stablehlo.add %1, %m : {T}
      return %0, %2 : {T}, {T} }}"""
    for halves, held in (("cpu, cuda", [0, 512]), ("cuda, cuda", [256, 512])):
        module = simulate(monkeypatch, text, HALVES[halves])
        (variant,) = module._bundle.manifest["variants"]
        assert [row["constants"] for row in variant["spaces"]] == held
        assert module._bundle.segment(variant["constants"]["segment"]).nbytes == 512
        assert [loaded.constants_bytes for loaded in module._executable.gpus] == [n for n in held if n]


def test_a_branch_on_one_device_in_a_loop_on_another(monkeypatch):
    text = loop(f"""%a = {product("%y", "%y")}
      %q = stablehlo.constant dense<0.1> : {T}
      %e = stablehlo.multiply %a, %q : {T}
      %s = stablehlo.sine %e : {T}""")
    simulate(monkeypatch, text, HALVES["cuda, cpu"], verify_each=True)


def test_weights_in_a_file_and_the_source(tmp_path, monkeypatch):
    """A bundle for a mix is compiled again from its source, to the same bytes."""
    w = array(64, 32)
    values = ", ".join(f"{v:.6e}" for v in w.reshape(-1))
    text = f"""func.func public @main(%x: tensor<4x64xf32> {FIRST},
        %y: tensor<4x32xf32> {SECOND}) -> tensor<4x32xf32> {{
      %f = stablehlo.constant dense<[{values}]> : tensor<2048xf32>
      %c = stablehlo.reshape %f : (tensor<2048xf32>) -> tensor<64x32xf32>
      %0 = stablehlo.dot_general %x, %c, contracting_dims = [1] x [0]
        : (tensor<4x64xf32>, tensor<64x32xf32>) -> tensor<4x32xf32>
      %2 = stablehlo.add %0, %y : tensor<4x32xf32>
      return %2 : tensor<4x32xf32> }}"""
    for devices in HALVES.values():
        data = aotc.compile(text, devices=devices, target="cpu:x86-64-v3")
        assert aotc.upgrade(data) == data
    x, y = array(4, 64, seed=1), array(4, 32, seed=2)
    path = str(tmp_path / "w.safetensors")
    data = aotc.compile(text, devices=HALVES["cuda, cpu"], weights=path)
    (tmp_path / "m.vmfb").write_bytes(data)
    install(monkeypatch, data)
    module = aotc.load(tmp_path / "m.vmfb", verify=True)
    np.testing.assert_allclose(np.asarray(module(x, y)), alone(text, x, y)[0], rtol=1e-4, atol=1e-4)


def test_what_cannot_run_there_is_named(monkeypatch):
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %0 = {to("d1", "%x")}
      %1 = stablehlo.custom_call @mine(%0) : ({T}) -> {T}
      return %1 : {T} }}"""
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})  # or no bundle of this process would be cached any more
    aotc.register_custom_call("mine", lambda x: x, native=False)
    with pytest.raises(CompileError, match="custom call @mine is not supported on target cuda:sm_90"):
        aotc.compile(text, devices=HALVES["cpu, cuda"])


@pytest.mark.parametrize(
    ("target", "d0", "d1", "found"),
    [
        ("cpu", "cpu:x86-64-v2", "cpu:aarch64", "d0 is cpu:x86-64-v2, d1 is cpu:aarch64"),
        ("cpu:aarch64", "cpu:x86-64-v3", "", "d0 is cpu:x86-64-v3, d1 is cpu:aarch64"),
        ("cpu", "cpu:x86-64-v2,cpu:x86-64-v3", "", "device 'd0' is of several targets"),
    ],
)
def test_devices_that_do_not_fit_together_are_refused(target, d0, d1, found):
    with pytest.raises(CompileError, match=found):
        aotc.compile(stages(), target=target, devices={"d0": d0, **({"d1": d1} if d1 else {})})


@pytest.mark.parametrize(
    ("devices", "found"),
    [
        ({"d0": "cpu:0"}, "d1: cuda"),
        ({"d0": "cpu:0", "d1": "cpu:1"}, "'d1' is of another kind"),
        ({"d0": "cpu:0", "d1": "cuda:7"}, "there is no GPU 7"),
        ({"d0": "cpu:0", "d9": "cuda:0"}, "d0: cpu, d1: cuda"),
        (["cuda:0"], "devices= has 1, and the model names 2"),
        (["cuda:0", "cpu:0"], "'d0' is of another kind"),
        ("cuda", "it is for d0: cpu, d1: cuda"),
        ("cpu", "it is for d0: cpu, d1: cuda"),
    ],
)
def test_devices_at_load_are_those_of_the_model(devices, found, monkeypatch):
    data = aotc.compile(small_stages(), devices=HALVES["cpu, cuda"])
    install(monkeypatch, data)
    with pytest.raises(BundleError, match=found):
        aotc.load(data, devices=devices)
    assert aotc.load(data, devices=["cpu:2", "cuda:0"]).devices == {"d0": "cpu:2", "d1": "cuda:0"}


def test_devices_at_load_are_kept(monkeypatch):
    data = aotc.compile(small_stages(), devices=HALVES["cuda, cuda"])
    install(monkeypatch, data, count=2)
    assert aotc.load(data).devices == {"d0": "cuda:0", "d1": "cuda:1"}
    module = aotc.load(data, devices={"d0": "cuda:1", "d1": "cuda:1"})
    assert [loaded.ordinal for loaded in module._executable.gpus] == [1, 1]
    assert len({id(loaded.gpu) for loaded in module._executable.gpus}) == 2  # a stream each
    assert aotc.load(data, devices=["cuda:1", "cuda:0"]).devices == {"d0": "cuda:1", "d1": "cuda:0"}
    assert aotc.load(data, devices="cuda").devices == {"d0": "cuda:0", "d1": "cuda:1"}
    install(monkeypatch, data, count=1)
    assert aotc.load(data).devices == {"d0": "cuda:0", "d1": "cuda:0"}


def test_a_machine_without_a_gpu(monkeypatch):
    data = aotc.compile(small_stages(), devices=HALVES["cpu, cuda"])
    monkeypatch.setattr(cuda_driver, "missing", lambda: "no NVIDIA driver (libcuda.so.1)")
    with pytest.raises(BundleError, match="cuda:sm_90a: no NVIDIA driver"):
        aotc.load(data)


def test_inspect_lists_devices_and_transfers(tmp_path):
    from aotc_cli.main import app

    path = tmp_path / "m.vmfb"
    devices = {"d0": "cpu:x86-64-v3", "d1": "cuda:sm_90"}
    path.write_bytes(aotc.compile(small_stages(), devices=devices))
    shown = " ".join(CliRunner().invoke(app, ["inspect", str(path)]).output.split())
    kernels = ("cpu:x86-64-v3: 1 kernel", "cuda:sm_90a: 1 kernel")
    places = ("d0: cpu:x86-64-v3 (cpu:0)", "d1: cuda:sm_90a (cuda:0)")
    for part in (*places, "1 transfer", "(160 B) from d0 to d1", *kernels):
        assert part in shown
    (variant,) = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)["variants"]
    assert [part["target"] for part in variant["parts"]] == ["cpu:x86-64-v3", "cuda:sm_90a"]
    assert variant["transfers"][0]["bytes"] == 4 * 2 * 20
