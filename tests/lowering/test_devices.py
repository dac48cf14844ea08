"""Devices of a model: where ops and values go, what is moved, and that results are those of one device."""

import re
from dataclasses import replace

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import walk
from aotc.lowering.invariants import operands_are_on_their_devices
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu

T = "tensor<8x8xf32>"
FIRST, SECOND = '{aotc.affinity = "d0"}', '{aotc.affinity = "d1"}'


def product(x, y):
    precision = "precision = [HIGHEST, HIGHEST]"
    return f"stablehlo.dot_general {x}, {y}, contracting_dims = [1] x [0], {precision} : ({T}, {T}) -> {T}"


def to(device, x):
    return f'stablehlo.custom_call @aotc.transfer({x}) {{aotc.to = "{device}"}} : ({T}) -> {T}'


def stages(result="", transfer=True, name="aotc.affinity"):
    """A product on ``d0`` and one on ``d1``, whose weights are the larger operand."""
    text = f"""func.func public @main(%x: tensor<16x128xf32> {{aotc.affinity = "d0"}},
        %w0: tensor<128x256xf32> {{aotc.affinity = "d0"}}, %w1: tensor<256x64xf32> {{aotc.affinity = "d1"}})
        -> (tensor<16x64xf32> {result}) {{
      %0 = stablehlo.dot_general %x, %w0, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
        : (tensor<16x128xf32>, tensor<128x256xf32>) -> tensor<16x256xf32>
      %1 = stablehlo.custom_call @aotc.transfer(%0) {{aotc.to = "d1"}} : (tensor<16x256xf32>) -> tensor<16x256xf32>
      %2 = stablehlo.dot_general %1, %w1, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
        : (tensor<16x256xf32>, tensor<256x64xf32>) -> tensor<16x64xf32>
      return %2 : tensor<16x64xf32> }}"""
    if not transfer:
        text = re.sub(r"%1 = .*\n", "", text).replace("%2 = stablehlo.dot_general %1", "%2 = stablehlo.dot_general %0")
    return text.replace("aotc.affinity", name)


def loop(body, cond="%k, %n"):
    return f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %i = stablehlo.constant dense<0> : tensor<i32>
      %n = stablehlo.constant dense<5> : tensor<i32>
      %one = stablehlo.constant dense<1> : tensor<i32>
      %r:2 = stablehlo.while(%k = %i, %y = %x) : tensor<i32>, {T}
        cond {{
          %c = stablehlo.compare LT, {cond} : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1> }}
        do {{
          %k1 = stablehlo.add %k, %one : tensor<i32>
          {body}
          stablehlo.return %k1, %s : tensor<i32>, {T} }}
      return %r#1 : {T} }}"""


PROGRAMS = {
    "two results": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %0 = stablehlo.add %x, %x : {T}
      %1 = {to("d1", "%0")}
      %2 = stablehlo.multiply %1, %w : {T}
      return %0, %2 : {T}, {T} }}""", ["d0", "d1"], 1),
    "an argument that is a result": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %0 = stablehlo.add %x, %x : {T}
      return %w, %0 : {T}, {T} }}""", ["d1", "d0"], 0),
    "a carried value goes to and fro": (loop(f"""%a = {product("%y", "%y")}
      %b = {to("d1", "%a")}
      %d = stablehlo.multiply %b, %w : {T}
      %e = {to("d0", "%d")}
      %s = stablehlo.sine %e : {T}"""), ["d0"], 2),
    "the loop does not change it": (loop(f"""%t = {to("d0", "%w")}
      %a = {product("%y", "%t")}
      %s = stablehlo.sine %a : {T}"""), ["d0"], 1),
    "branches": (f"""func.func public @main(%i: tensor<i32> {SECOND}, %x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %r = "stablehlo.case"(%i) ({{
        %a = stablehlo.sine %x : {T}
        stablehlo.return %a : {T}
      }}, {{
        %b = stablehlo.cosine %w : {T}
        stablehlo.return %b : {T}
      }}) : (tensor<i32>) -> {T}
      return %r : {T} }}""", ["d0"], 1),
    "constants are everybody's": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %c = stablehlo.constant dense<2.0> : {T}
      %0 = stablehlo.multiply %x, %c : {T}
      %1 = stablehlo.multiply %w, %c : {T}
      return %0, %1 : {T}, {T} }}""", ["d0", "d1"], 0),
    "what is made of constants": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %i = stablehlo.iota dim = 0 : tensor<8x8xi32>
      %j = stablehlo.iota dim = 1 : tensor<8x8xi32>
      %m = stablehlo.compare GE, %i, %j : (tensor<8x8xi32>, tensor<8x8xi32>) -> tensor<8x8xi1>
      %z = stablehlo.constant dense<0.0> : {T}
      %0 = stablehlo.select %m, %x, %z : tensor<8x8xi1>, {T}
      %1 = stablehlo.select %m, %w, %z : tensor<8x8xi1>, {T}
      return %0, %1 : {T}, {T} }}""", ["d0", "d1"], 0),
    "moved once": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
      %0 = stablehlo.sine %x : {T}
      %1 = {to("d1", "%0")}
      %2 = stablehlo.multiply %1, %w : {T}
      %3 = {to("d1", "%0")}
      %4 = stablehlo.add %3, %w : {T}
      return %2, %4 : {T}, {T} }}""", ["d1", "d1"], 1),
    "there and back": (f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %0 = {to("d1", "%x")}
      %1 = {to("d0", "%0")}
      %2 = stablehlo.sine %1 : {T}
      return %2 : {T} }}""", ["d0"], 0),
    "the model's transfer": (stages(), ["d1"], 1),
    "a transfer that is needed": (stages(transfer=False), ["d1"], 1),
    "the result is wanted elsewhere": (stages('{aotc.affinity = "d0"}'), ["d0"], 2),
    "other spelling": (stages(name="iree.abi.affinity"), ["d1"], 1),
}  # fmt: skip


def on_one_device(text):
    """Return the model without devices."""
    text = re.sub(r"\{(aotc|iree\.abi)\.affinity = \"d\d\"\}", "", text)
    pattern = r"stablehlo\.custom_call @aotc\.transfer\((%\w+)\) \{aotc\.to = \"d\d\"\} : \((\S+?)\) -> \S+"
    return re.sub(pattern, r"stablehlo.reshape \1 : (\2) -> \2", text)


def inputs_of(module):
    rng = np.random.default_rng(0)
    return [
        np.int32(1) if a["dtype"] == "i32" else rng.standard_normal(a["dims"]).astype("float32")
        for a in module.main.signature.arguments
    ]


def transfers(data):
    return open_bundle(data).manifest["variants"][0]["transfers"]


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("name", PROGRAMS)
def test_several_devices_match_one_device(name, level):
    text, devices, moved = PROGRAMS[name]
    data = aotc.compile(text, opt_level=level, verify_each=True)
    module = aotc.load(data)
    arrays = inputs_of(module)
    results = module.invoke("main", *arrays, results="device")
    alone = aotc.load(aotc.compile(on_one_device(text), opt_level=level)).invoke("main", *arrays)
    assert [r.device for r in results] == devices
    for x, y in zip(results, alone, strict=True):  # a loop on one device may be one kernel, which rounds elsewhere
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-4, atol=1e-5)
    assert len(transfers(data)) == moved


@pytest.mark.parametrize("count", range(2, 9))
def test_stages_run_on_their_devices(count):
    body = "".join(
        f"%a{n} = {product(f'%b{n - 1}' if n else '%x', f'%w{n}')}\n%b{n} = stablehlo.sine %a{n} : {T}\n"
        for n in range(count)
    )
    weights = ", ".join(f'%w{n}: {T} {{aotc.affinity = "d{n}"}}' for n in range(count))
    text = f"func.func public @main(%x: {T} {FIRST}, {weights}) -> {T} {{ {body} return %b{count - 1} : {T} }}"
    data = aotc.compile(text, verify_each=True)
    module = aotc.load(data)
    assert module.devices == {f"d{n}": f"cpu:{n}" for n in range(count)}
    arrays = inputs_of(module)
    alone = aotc.load(aotc.compile(on_one_device(text))).invoke("main", *arrays)
    np.testing.assert_array_equal(module.invoke("main", *arrays)[0], alone[0])


def test_the_smaller_operand_is_transferred():
    (transfer,) = transfers(aotc.compile(stages(transfer=False)))
    assert (transfer["from"], transfer["to"], transfer["type"]) == ("d0", "d1", "f32[16, 256]")
    assert transfer["reason"] == "dot_general reads it there"


def devices_of(text, **flags):
    """The device of each op of a model by its name, after the pass that assigns them."""
    module = run_passes(import_model(text), Options(stop_after="assign-devices", **flags))
    ops = walk(module.functions["main"].body)
    return [(op.name, op.attrs["device"], op.attrs.get("reason")) for op in ops if "device" in op.attrs]


def test_each_op_and_transfer_has_a_reason():
    assert devices_of(stages(transfer=False)) == [
        ("dot_general", "d0", "its operands are there"),
        ("transfer", "d1", "dot_general reads it there"),
        ("dot_general", "d1", "moves 16.4 kB; it would be 65.5 kB to d0"),
    ]


UNPLACED = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}, %free: {T}) -> ({T}, {T}, {T}) {{
  %0 = stablehlo.sine %free : {T}
  return %x, %w, %0 : {T}, {T}, {T} }}"""


def planted(module, change):
    """What breaks the predicate of devices where ``change`` was made to each op of the function."""
    f = module.functions["main"]
    ops = tuple(change(op) for op in f.body.ops)
    return operands_are_on_their_devices(module.with_functions({"main": replace(f, body=replace(f.body, ops=ops))}))


@pytest.mark.parametrize("stop", ["assign-devices", "isolate-devices", "dce"])
def test_the_verifier_finds_operands_on_another_device(stop):
    """An op that reads a value of another device, a transfer from where the value is not, a result elsewhere."""
    module = run_passes(import_model(stages()), Options(stop_after=stop))
    assert planted(module, lambda op: op) == []
    for key in ("device", "source"):

        def elsewhere(op, key=key):
            return replace(op, attrs={**op.attrs, key: "d9"}) if key in op.attrs else op

        found = planted(module, elsewhere)
        assert any("d9" in f.message for f in found)


def test_a_value_without_a_device_is_named():
    with pytest.raises(CompileError) as caught:
        aotc.compile(UNPLACED)
    for part in ("argument 'arg2' of @main", "the device of sin is not specified", "d0, d1", "--default-device"):
        assert part in str(caught.value)
    module = aotc.load(aotc.compile(UNPLACED, default_device="d1"))
    assert [r["device"] for r in module.main.signature.results] == ["d0", "d1", "d1"]


def test_max_transfers_limits_the_transfers():
    aotc.compile(stages(), max_transfers=1)
    with pytest.raises(CompileError, match="transfers between devices: found 1, expected at most 0"):
        aotc.compile(stages(), max_transfers=0)


def test_device_results_convert_to_numpy_arrays():
    module = aotc.load(aotc.compile(stages()))
    arrays = inputs_of(module)
    (result,) = module.invoke("main", *arrays, results="device")
    (plain,) = module.invoke("main", *arrays)
    assert (result.device, result.shape, result.dtype, result.nbytes) == ("d1", (16, 64), np.float32, plain.nbytes)
    np.testing.assert_array_equal(np.asarray(result), plain)
    np.testing.assert_array_equal(np.from_dlpack(result), plain)
    np.testing.assert_array_equal(np.array(result, dtype="float64"), plain.astype("float64"))
    assert "device='d1'" in repr(result)
    assert module.submit("main", *arrays, results="device").result()[0].device == "d1"
    module.invoke("main", result.numpy()[:, :1].repeat(128, 1), *arrays[1:])
    with pytest.raises(CallError, match="results is 'gpu'"):
        module.invoke("main", *arrays, results="gpu")


@pytest.mark.parametrize(("name", "options"), [("d11", {}), ("D1", {}), ("d2", {"default_device": "d0"}), ("gpu", {})])
def test_a_device_named_only_by_a_transfer_is_refused(name, options):
    text = stages().replace('{aotc.to = "d1"}', f'{{aotc.to = "{name}"}}')
    with pytest.raises(CompileError, match=rf"aotc.to names device '{name}', .* name d0, d1") as caught:
        aotc.compile(text, **options)
    near = [] if name == "gpu" else ['write {aotc.to = "d']
    assert all(part in str(caught.value) for part in (*near, f"--device {name}=TARGET", "<model>:"))


@pytest.mark.parametrize("name", ["dO", "D1", "d2"])
def test_a_device_named_only_by_an_op_is_refused(name):
    text = stages().replace('{aotc.to = "d1"}', f'{{aotc.to = "d1", aotc.affinity = "{name}"}}')
    with pytest.raises(CompileError, match=rf"aotc.affinity names device '{name}', .* name d0, d1") as caught:
        aotc.compile(text)
    assert all(part in str(caught.value) for part in ('write {aotc.affinity = "d', f"--device {name}=TARGET"))
    assert aotc.compile(text, devices={"d0": "cpu", "d1": "cpu", name: "cpu"})


@pytest.mark.parametrize("options", [{"devices": {"d2": "cpu"}}, {"default_device": "d2"}])
def test_options_declare_the_device_of_a_transfer(options):
    text = stages().replace('{aotc.to = "d1"}', '{aotc.to = "d2"}')
    assert aotc.compile(text, **options)


def test_a_transfer_without_a_device_name_is_refused():
    text = stages().replace('{aotc.to = "d1"}', "{aotc.to = 3 : i32}")
    with pytest.raises(CompileError, match=r"aotc.to"):
        aotc.compile(text)


def test_symbolic_sizes_on_two_devices_match_numpy():
    """Sizes that the host program reads part what is before from what is after."""
    text = """func.func public @main(%x: tensor<?x8xf32> {aotc.affinity = "d0"},
        %w: tensor<8x8xf32> {aotc.affinity = "d1"}) -> tensor<?x8xf32> {
      %0 = stablehlo.sine %x : tensor<?x8xf32>
      %1 = stablehlo.dot_general %0, %w, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
        : (tensor<?x8xf32>, tensor<8x8xf32>) -> tensor<?x8xf32>
      return %1 : tensor<?x8xf32> }"""
    module = aotc.load(aotc.compile(text, verify_each=True))
    x, w = np.ones((3, 8), "float32"), np.eye(8, dtype="float32")
    np.testing.assert_allclose(module(x, w), np.sin(x), rtol=1e-6)


OPS = ("add", "multiply", "subtract", "maximum")


def declared(count):
    """A function that nothing calls, whose affinities let ops and transfers name the devices."""
    arguments = ", ".join(f'%x{n}: {T} {{aotc.affinity = "d{n}"}}' for n in range(count))
    return f"func.func private @devices({arguments}) {{ return }}"


def used(device):
    """An op that nothing reads, on the device."""
    return f'%{device} = stablehlo.constant {{aotc.affinity = "{device}"}} dense<0.0> : {T}'


def random_program(rng):
    """Ops on values of up to four devices, loops and branches, transfers here and there."""
    lines, values, count = [], ["%x0", "%x1", "%x2"], int(rng.integers(2, 5))

    def step(values, prefix, n):
        a, b = (values[int(rng.integers(len(values)))] for _ in range(2))
        made = f"%{prefix}{n}"
        match int(rng.integers(6)):
            case 0:
                return made, f"{made} = {to(f'd{rng.integers(count)}', a)}"
            case 1:
                return made, f"{made} = {product(a, b)}\n"
            case 2:
                half = f"%c{prefix}{n}"
                constant = f"{half} = stablehlo.constant dense<0.5> : {T}"
                return made, f"{constant}\n{made} = stablehlo.multiply {a}, {half} : {T}"
            case _:
                return made, f"{made} = stablehlo.{OPS[int(rng.integers(4))]} {a}, {b} : {T}"

    def block(values, prefix, length):
        inner, text = list(values), []
        for n in range(length):
            made, line = step(inner, prefix, n)
            text.append(line)
            inner.append(made)
        return inner[-1], "\n".join(text)

    for n in range(int(rng.integers(3, 12))):
        kind = int(rng.integers(8))
        if kind == 0:
            last, body = block([*values, f"%y{n}"], f"l{n}_", 4)
            start = values[int(rng.integers(len(values)))]
            lines.append(f"""%i{n} = stablehlo.constant dense<0> : tensor<i32>
              %n{n} = stablehlo.constant dense<3> : tensor<i32>
              %one{n} = stablehlo.constant dense<1> : tensor<i32>
              %r{n}:2 = stablehlo.while(%k{n} = %i{n}, %y{n} = {start}) : tensor<i32>, {T}
              cond {{ %c{n} = stablehlo.compare LT, %k{n}, %n{n} : (tensor<i32>, tensor<i32>) -> tensor<i1>
                stablehlo.return %c{n} : tensor<i1> }}
              do {{ %k1{n} = stablehlo.add %k{n}, %one{n} : tensor<i32>
                {body}
                %s{n} = stablehlo.tanh {last} : {T}
                stablehlo.return %k1{n}, %s{n} : tensor<i32>, {T} }}""")
            values.append(f"%r{n}#1")
        elif kind == 1:
            branches = [block(values, f"b{n}_{k}_", 3) for k in range(2)]
            regions = ", ".join(f"{{ {body}\nstablehlo.return {last} : {T} }}" for last, body in branches)
            lines.append(f'%v{n} = "stablehlo.case"(%choice) ({regions}) : (tensor<i32>) -> {T}')
            values.append(f"%v{n}")
        else:
            made, line = step(values, "v", n)
            lines.append(line)
            values.append(made)
    affinity = [f' {{aotc.affinity = "d{rng.integers(count)}"}}' for _ in range(6)]
    arguments = ", ".join(f"%x{n}: {T}{affinity[n]}" for n in range(3))
    body = "\n".join([*(used(f"d{n}") for n in range(count)), *lines])
    return f"""{declared(count)}
      func.func public @main(%choice: tensor<i32>{affinity[3]}, {arguments})
      -> ({T}{affinity[4]}, {T}) {{
      {body}
      return {", ".join(values[-2:])} : {T}, {T} }}"""


@pytest.mark.parametrize("seed", [*range(40), 1030, 1273])
def test_random_placed_programs_match_one_device_after_every_pass(seed):
    """Devices change no number: by the reference of the op table, after every pass verified."""
    text = random_program(np.random.default_rng(seed))
    module, alone = import_model(text), import_model(on_one_device(text))
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    expected = interpret(alone, *arrays)
    for stop in ("assign-devices", "isolate-devices", "dce"):
        after = run_passes(module, Options(stop_after=stop, verify_each=True))
        for x, y in zip(interpret(after, *arrays), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(40, 52))
def test_compiled_random_placed_programs_match_one_device(seed):
    text = random_program(np.random.default_rng(seed))
    rng = np.random.default_rng(seed)
    arrays = [np.int32(seed % 2), *(rng.standard_normal((8, 8)).astype("float32") / 4 for _ in range(3))]
    results = aotc.load(aotc.compile(text, verify_each=True, opt_level=seed % 4)).invoke("main", *arrays)
    expected = interpret(import_model(on_one_device(text)), *arrays)
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


ASSERTION = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
  %z = stablehlo.constant dense<0.0> : tensor<f32>
  %s = stablehlo.reduce(%w init: %z) applies stablehlo.add across dimensions = [0, 1]
    : ({T}, tensor<f32>) -> tensor<f32>
  %c = stablehlo.compare GT, %s, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
  %y = stablehlo.sine %x : {T}
  stablehlo.custom_call @shape_assertion(%c) {{error_message = "w sums to nothing", has_side_effect = true}}
    : (tensor<i1>) -> ()
  %t = {to("d1", "%y")}
  %r = stablehlo.add %t, %w : {T}
  return %y, %r : {T}, {T} }}"""


def test_a_check_on_another_device_runs_first():
    x = np.ones((8, 8), "float32")
    for level in range(4):
        module = aotc.load(aotc.compile(ASSERTION, verify_each=True, opt_level=level))
        np.testing.assert_allclose(module.invoke("main", x, x)[1], np.sin(x) + x, rtol=1e-6)
        out = [np.zeros((8, 8), "float32") for _ in range(2)]
        with pytest.raises(CallError, match="w sums to nothing"):
            module.invoke("main", x, -x, out=out)
        assert not any(o.any() for o in out)
