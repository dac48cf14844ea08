"""What people see when something is wrong: the place, what was found, what to do; never a traceback."""

import subprocess
import sys

import numpy as np
import pytest
from support import tiny

import aotc
from aotc import BundleError, CallError, CompileError
from aotc.targets import resolve_targets
from aotc.vmfb.bundle import write_bundle

ADD = """module @demo {
  func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %y : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def refused(model, *parts, **options):
    """Compile must fail with a message that holds every part."""
    with pytest.raises(CompileError) as caught:
        aotc.compile(model, **options)
    for part in parts:
        assert part in str(caught.value)


# ---------------------------------------------------------------- models


@pytest.mark.ir
def test_an_unknown_custom_call_is_reported_with_its_location():
    call = "stablehlo.custom_call @nobody_knows(%x) : (tensor<4xf32>) -> tensor<4xf32>"
    text = ADD.replace("stablehlo.add %x, %y : tensor<4xf32>", call)
    refused(text, "nobody_knows", "error:")


@pytest.mark.ir
def test_syntax_error_shows_the_line():
    refused(ADD.replace("stablehlo.add", "stablehlo.addd"), "3:", "stablehlo.addd")


@pytest.mark.ir
def test_type_error_shows_the_line():
    refused(ADD.replace("%y: tensor<4xf32>", "%y: tensor<5xf32>"), "3:")


@pytest.mark.ir
@pytest.mark.parametrize("data", [b"", b"\x00\x01\x02", b"ML\xefR\x00garbage", b"not a model at all", "module {"])
def test_unreadable_models_are_compile_errors(data):
    refused(data, "error:")


@pytest.mark.ir
def test_truncated_bytecode_is_a_compile_error(tmp_path):
    import jax

    exported = jax.export.export(jax.jit(lambda x: x + 1))(np.ones(3, "f4"))
    blob = bytes(exported.mlir_module_serialized)
    refused(blob[: len(blob) // 2], "error:")
    refused(exported.serialize()[:200], "error:")


@pytest.mark.ir
def test_missing_files_and_other_objects_are_compile_errors(tmp_path):
    refused(tmp_path / "missing.mlir", "missing.mlir", "No such file or directory")
    refused(42, "not int")


@pytest.mark.ir
def test_an_unknown_target_lists_the_known_ones():
    refused(ADD, "unknown target 'cpu:pentium'", "cpu:x86-64-v3", target="cpu:pentium")


@pytest.mark.ir
def test_example_arguments_must_be_arrays():
    with pytest.raises(CompileError, match="an example argument is a str"):
        aotc.compile(lambda x, mode: x, np.ones(3, "float32"), "abc")


@pytest.mark.ir
def test_a_function_that_cannot_be_traced_is_a_compile_error():
    def wrong(x):
        return x if x.sum() > 0 else -x

    with pytest.raises(CompileError, match="cannot export"):
        aotc.compile(wrong, np.ones(3, "f4"))


# ---------------------------------------------------------------- calls


@pytest.fixture(scope="module")
def tiny_module():
    return aotc.load(tiny.bundle())


@pytest.mark.ir
@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ((np.ones(4, "f4"),), ("wrong number of arguments", "x: f32[4], y: f32[4]")),
        ((np.ones(5, "f4"), np.ones(4, "f4")), ("argument 0 (x) has the wrong shape", "f32[5]", "f32[4]")),
        ((np.ones(4, "f4"), np.ones(4, "f2")), ("argument 1 (y) has the wrong dtype", "f16[4]", "astype")),
        ((np.ones(4, "f4"), "hello"), ("argument 1 (y)", "not an array", "str")),
        ((np.ones(4, "f4"), np.ones((4, 1), "f4")), ("argument 1 (y) has the wrong shape",)),
        ((np.ones(4, "f4"), None), ("argument 1 (y)",)),
    ],
)
def test_wrong_arguments_are_reported_by_name(tiny_module, values, parts):
    with pytest.raises(CallError) as caught:
        tiny_module.invoke("main", *values)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.ir
def test_a_failed_assertion_of_the_program_is_a_call_error(tiny_module):
    with pytest.raises(CallError, match="n is 3, expected at least 4"):
        tiny_module.invoke("grow", np.ones(3, "f4"))


class Opaque:
    """Says that it is an array, and is none."""

    def __array__(self, *args, **kwargs):
        raise KeyError("mine")


@pytest.mark.ir
@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda m, x: m(x, Opaque()), "cannot be read as an array"),
        (lambda m, x: m.invoke([], x, x), "no function"),
        (lambda m, x: m.invoke("main", x, x, out=3), "out is not a sequence"),
        (lambda m, x: m.invoke("main", x, x, trace=3), "trace is not a folder"),
        (lambda m, x: m.invoke("main", x, x, trace="/proc/nowhere/x"), "cannot write the trace"),
    ],
)
def test_calls_with_arguments_of_wrong_types_are_refused(tiny_module, call, part):
    with pytest.raises(CallError, match=part):
        call(tiny_module, np.ones(4, "f4"))


# ---------------------------------------------------------------- bundles and machines


@pytest.mark.ir
@pytest.mark.parametrize("source", [42, None, object(), [], "a\0b", np.ones((4, 4))[:, ::2]])
def test_objects_of_other_types_are_refused_as_bundles(source):
    with pytest.raises(BundleError):
        aotc.load(source)


@pytest.mark.ir
@pytest.mark.parametrize("devices", [42, ["cpu", 3], object(), [None]])
def test_invalid_device_names_are_refused(devices):
    with pytest.raises(BundleError, match="devices are named"):
        aotc.load(tiny.bundle(), devices=devices)


@pytest.mark.ir
@pytest.mark.parametrize("calls", [3, [len], {"f": 3}])
def test_custom_calls_must_be_functions(calls):
    with pytest.raises(CallError, match="custom_calls are not functions"):
        aotc.load(tiny.bundle(), custom_calls=calls)


@pytest.mark.ir
def test_a_manifest_with_a_dtype_that_is_not_text_is_refused():
    manifest, segments = tiny.parts()
    manifest["variants"][0]["functions"]["upto"]["code"][1][4] = []
    with pytest.raises(BundleError, match="not an integer dtype"):
        aotc.load(write_bundle(None, manifest, segments))


@pytest.mark.ir
@pytest.mark.parametrize("place", ["check_functions", "choose_variant", "LoadedModule", "open_bundle"])
def test_loader_exceptions_name_the_bundle(place, monkeypatch, tmp_path):
    def broken(*args):
        raise KeyError("planted")

    monkeypatch.setattr(f"aotc.vmfb.module.{place}", broken)
    path = tmp_path / "m.vmfb"
    path.write_bytes(tiny.bundle())
    with pytest.raises(BundleError, match=r"m\.vmfb: error: the bundle cannot be loaded: KeyError") as caught:
        aotc.load(path)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.ir
def test_truncated_and_corrupted_bundles_are_refused():
    data = tiny.bundle()
    with pytest.raises(BundleError, match="truncated"):
        aotc.load(data[:-1])
    for at in range(0, len(data), len(data) // 40):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(BundleError):
            aotc.load(bytes(broken), verify=True)


@pytest.mark.ir
def test_bundles_for_other_cpus_and_devices_are_refused():
    manifest, segments = tiny.parts()
    manifest["variants"][0]["features"] = ["unobtainium"]
    with pytest.raises(BundleError, match="this CPU lacks unobtainium"):
        aotc.load(write_bundle(None, manifest, segments))
    with pytest.raises(BundleError, match="no code for cuda"):
        aotc.load(tiny.bundle(), devices="cuda:0")
    with pytest.raises(BundleError, match="unknown device 'tpu'"):
        aotc.load(tiny.bundle(), devices="tpu:0")


@pytest.mark.ir
def test_a_missing_gpu_driver_is_not_a_reason_to_compile_for_this_machine(monkeypatch):
    from aotc.vmfb.devices.cuda import driver

    monkeypatch.setattr(driver, "missing", lambda: "no NVIDIA driver")
    manifest, segments = tiny.parts()
    gpu = {**manifest["variants"][0], "kind": "cuda", "target": "cuda:sm_90"}
    both = write_bundle(None, {**manifest, "variants": [*manifest["variants"], gpu]}, segments)
    with pytest.raises(BundleError, match=r"cuda:sm_90: no NVIDIA driver") as caught:
        aotc.load(both, devices="cuda:0")
    assert "try: leave out --device (devices=), or run it on a machine with an NVIDIA GPU" in str(caught.value)
    alone = write_bundle(None, {**manifest, "variants": [gpu]}, segments)
    for devices in (None, "cuda:0"):
        with pytest.raises(BundleError, match=r"cuda:sm_90: no NVIDIA driver") as caught:
            aotc.load(alone, devices=devices)
        assert "try: compile with --target=cpu, or run it on a machine with an NVIDIA GPU" in str(caught.value)
        assert "for this machine" not in str(caught.value)


@pytest.mark.ir
def test_other_files_are_refused_as_bundles(tmp_path):
    with pytest.raises(BundleError, match="not an aotc bundle"):
        aotc.load(b"PK\x03\x04" + bytes(100))
    with pytest.raises(BundleError, match="No such file"):
        aotc.load(tmp_path / "missing.vmfb")
    (tmp_path / "m.mlir").write_text(ADD)
    with pytest.raises(BundleError, match=r"this is a model: `aotc compile .*m\.mlir -o model\.vmfb`"):
        aotc.load(tmp_path / "m.mlir")
    with pytest.raises(BundleError, match="this is a model"):
        aotc.load(b"ML\xefR" + bytes(100))


@pytest.mark.ir
def test_a_full_disk_is_an_error():
    manifest, segments = tiny.parts()
    with pytest.raises(BundleError, match="cannot write the bundle"):
        write_bundle("/dev/full/x.vmfb", manifest, segments)


@pytest.mark.ir
def test_compile_without_its_extra_names_the_install_command(tmp_path):
    model = tmp_path / "add.mlir"
    model.write_text(ADD)
    code = (
        "import sys; sys.modules['jax'] = sys.modules['jaxlib'] = None\n"
        "sys.argv = ['aotc', 'compile', sys.argv[1], '-o', sys.argv[1] + '.vmfb']\n"
        "from aotc_cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, model], capture_output=True, text=True)
    assert done.returncode == 1
    assert "[compile]'" in done.stderr
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------- what is no model, and options that name nothing


@pytest.mark.ir
@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is empty"),
        (b"AOTCVMFB" + bytes(64), "a bundle, which is compiled already"),
        (b"\x93NUMPY\x01\x00", "a NumPy array"),
        (b"PK\x03\x04" + bytes(30), "a zip archive"),
        (b"HloModule jit_f\n", "HLO text of XLA"),
        (b"import jax\nprint(1)\n", ":1:1: error: custom op 'import' is unknown"),
    ],
)
def test_files_of_other_kinds_are_refused_as_models(data, part, tmp_path):
    path = tmp_path / "m.x"
    path.write_bytes(data)
    refused(path, "m.x:", "error:", part, "try:")


@pytest.mark.ir
def test_unranked_types_are_reported_with_their_file(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text("func.func @main(%a: tensor<*xf32>) -> tensor<*xf32> {\n  return %a : tensor<*xf32>\n}\n")
    refused(path, "m.mlir: error: type tensor<*xf32> is not supported")


@pytest.mark.ir
def test_a_bundle_needs_all_passes():
    parts = ("stop_after is 'cse', but compile makes a bundle, which needs all passes", "--stop-after=cse")
    refused(ADD, *parts, stop_after="cse")


@pytest.mark.ir
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"options": 3}, "options is 3"),
        ({"verbose": True}, "no option 'verbose'"),
        ({"ouput": "m.vmfb"}, "try: output=..."),
    ],
)
def test_invalid_option_values_are_refused(options, part):
    refused(ADD, part, "try:", **options)


@pytest.mark.ir
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"target": "gpu"}, "unknown target 'gpu'"),
        ({"print_after": "nopass"}, "no pass 'nopass'"),
        ({"stop_after": "nopass"}, "no pass 'nopass'"),
        ({"weights": "inlin"}, "weights is 'inlin'"),
        ({"dump_ir": __file__}, "which is not a folder"),
        ({"opt_level": 7}, "opt_level is 7"),
        ({"jobs": -3}, "jobs is -3"),
    ],
)
def test_options_with_unknown_names_are_refused(options, part):
    refused(ADD, part, "try:", **options)


@pytest.mark.ir
def test_a_target_named_twice_is_compiled_once():
    assert resolve_targets("cpu:x86-64-v3, cpu:x86-64-v3") == resolve_targets("cpu:x86-64-v3")


@pytest.mark.ir
def test_the_caret_marks_the_column_in_a_shortened_line(tmp_path):
    path = tmp_path / "m.mlir"
    path.write_text("module {\n  wrong here\n}")
    refused(path, "m.mlir:2:3: error:", "    wrong here\n    ^")
    path.write_text("module { func.func @main() { return } } wrong")
    refused(path, f"    {path.read_text()}\n    {' ' * 40}^")
    path.write_text(f"module {{ // {'9' * 5000}\nfunc.func @f() {{ }} {' ' * 3000} wrong {'9' * 5000}")
    with pytest.raises(CompileError) as caught:
        aotc.compile(path)
    assert max(map(len, str(caught.value).splitlines())) < 200
    path.write_bytes(b"#\x1b[2J\x00\xff\x07")
    with pytest.raises(CompileError) as caught:
        aotc.compile(path)
    assert str(caught.value).replace("\n", "").isprintable()
