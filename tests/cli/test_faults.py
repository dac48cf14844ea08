"""What leaves the compiler when a stage of it breaks: an error that says where, with what is needed to repeat it."""

import errno
import shlex
import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import aotc
import aotc.driver.assemble
import aotc.driver.weights
import aotc.frontend.importer
import aotc.frontend.mlir
import aotc.lowering.lower
from aotc import CompileError, InternalError, pipeline
from aotc.driver import bundle_cache
from aotc.frontend.importer import import_model
from aotc.options import Options
from aotc.tools.check import Checker
from aotc.tools.lint import lint
from aotc_cli import main

pytestmark = pytest.mark.ir

MODEL = """module @demo {
  func.func public @main(%x: tensor<4x4xf32>, %y: tensor<4x4xf32>) -> tensor<4x4xf32> {
    %0 = stablehlo.add %x, %y : tensor<4x4xf32>
    return %0 : tensor<4x4xf32>
  }
}
"""


def broken(*args, **kwargs):
    raise KeyError("planted")


def endless(*args, **kwargs):
    return endless()


STAGES = {
    "fetch": (aotc.frontend.mlir, "_read_file", "while reading the model"),
    "cache": (bundle_cache, "bundle_cache_key", "while looking for the bundle in the cache"),
    "parse": (aotc.frontend.importer, "read_source", "while importing the model"),
    "import": (aotc.frontend.importer, "import_module", "while importing the model"),
    "an op": (aotc.frontend.importer, "_run_importer", "while importing the model"),
    "region": (aotc.lowering.lower, "lower_region", "while lowering region k0_add"),
    "names": (aotc.lowering.lower, "free_loop_names", "while lowering"),
    "structure": (aotc.lowering.lower, "structural_key", "while lowering"),
    "bufferize": (aotc.lowering.lower, "bufferize", "while assigning storage"),
    "plan": (aotc.lowering.lower, "plan_stages", "while planning memory and schedule of @main"),
    "schedule": (aotc.lowering.lower, "CommandBufferEncoder", "while planning memory and schedule of @main"),
    "program": (aotc.lowering.lower, "emit_program", "while emitting the program of @main"),
    "join": (aotc.lowering.lower, "_join_specialized", "while joining the programs"),
    "kernels": (aotc.driver.assemble, "LibraryBuild", "while compiling the kernels"),
    "executor": (aotc.driver.assemble, "build_executor", "while compiling the kernels"),
    "manifest": (aotc.driver.assemble, "signature_entry", "while writing the bundle"),
    "write": (aotc.driver.assemble, "write_bundle", "while writing the bundle"),
    "check": (aotc.pipeline, "check_bundle", "while checking the bundle that was written"),
}


@pytest.fixture
def quick_kernels(monkeypatch):
    """Kernels of no code: only the stages before and after them matter."""
    compilation = aotc.kernels.cpu.build.Compilation
    monkeypatch.setattr(compilation, "finish", lambda self, _: [b""] * len(self.given[0]))
    for name in ("begin_ahead", "write_to_cache"):
        monkeypatch.setattr(compilation, name, lambda self: None)
    monkeypatch.setattr("aotc.kernels.cpu.build._EXECUTORS", {})
    monkeypatch.setattr("aotc.kernels.cpu.link.Linker.linked_library", lambda *_: b"")


def compile_quietly(monkeypatch, path, *flags):
    """Run ``aotc compile`` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["aotc", "compile", str(path), "-o", f"{path}.vmfb", "-q", *flags])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


@pytest.mark.parametrize("fault", [broken, endless])
@pytest.mark.parametrize("name", STAGES)
def test_an_internal_error_names_the_stage(name, fault, monkeypatch, quick_kernels, tmp_path, capsys):
    home, attribute, where = STAGES[name]
    monkeypatch.setattr(home, attribute, fault)
    monkeypatch.setattr(bundle_cache, "read_cached_bundle", lambda key: None)
    monkeypatch.setattr(bundle_cache, "any_registered", lambda: False)  # another test's custom calls
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    with pytest.raises(InternalError) as caught:
        aotc.compile(path)
    what = "KeyError: 'planted'" if fault is broken else "RecursionError"
    assert f"internal error: {where}" in str(caught.value)
    assert what in str(caught.value)
    assert "this is a bug in aotc" in str(caught.value)
    folder = Path(caught.value.dump)
    assert fault.__name__ in (folder / "traceback.txt").read_text()
    assert caught.value.__cause__ is not None
    if name not in ("fetch", "cache"):
        assert f"aotc compile {path} " in str(caught.value)
    assert compile_quietly(monkeypatch, path) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("number", range(len(pipeline.PASSES)))
def test_an_internal_error_in_a_pass_has_the_ir_before_it(number, monkeypatch, tmp_path):
    step = pipeline.PASSES[number]

    def run(module, options):
        raise KeyError("planted")

    run.__name__ = step.run.__name__
    passes = [*pipeline.PASSES]
    passes[number] = replace(step, run=run)
    monkeypatch.setattr(pipeline, "PASSES", tuple(passes))
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    with pytest.raises(InternalError, match=f"in pass {number + 1} {step.name}: KeyError: 'planted'") as caught:
        aotc.compile(path)
    assert "add" in (Path(caught.value.dump) / "before.txt").read_text()
    assert compile_quietly(monkeypatch, path, "--no-cache") == 2
    assert compile_quietly(monkeypatch, path, f"--stop-after={pipeline.PASSES[-1].name}") == 2


def test_a_model_from_memory_is_saved_for_reproduction(monkeypatch):
    monkeypatch.setattr(aotc.frontend.importer, "import_module", broken)
    with pytest.raises(InternalError) as caught:
        import_model(MODEL)
    file = Path(caught.value.dump) / "model.mlir"
    assert file.read_text() == MODEL
    assert f"aotc compile {file} " in str(caught.value)


def test_the_reproduction_command_has_the_options(monkeypatch, tmp_path):
    monkeypatch.setattr(aotc.lowering.lower, "bufferize", broken)
    flags = {"target": "cpu:x86-64-v3", "opt_level": 1, "bisect": 4, "dump_ir": str(tmp_path)}
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    with pytest.raises(InternalError, match=r"--target=cpu:x86-64-v3 --opt-level=1 --bisect=4 --verify-each"):
        aotc.compile(path, **flags)


def test_the_reproduction_command_is_quoted_for_the_shell(monkeypatch, tmp_path):
    monkeypatch.setattr(aotc.lowering.lower, "bufferize", broken)
    path = tmp_path / "my model; rm x.mlir"
    path.write_text(MODEL)
    with pytest.raises(InternalError) as caught:
        aotc.compile(path, weights="a b.safetensors")
    command = str(caught.value).rpartition("to repeat: ")[2]
    words = shlex.split(command)
    assert words[:5] == ["aotc", "compile", str(path), "-o", "model.vmfb"]
    assert "--weights=a b.safetensors" in words


def test_an_invalid_manifest_is_an_internal_error(monkeypatch, quick_kernels):
    monkeypatch.setattr(aotc.driver.assemble, "signature_entry", lambda f, devices, taken: {"arguments": 3})
    with pytest.raises(InternalError, match=r"while writing the bundle: BundleError: .*breaks the schema"):
        aotc.compile(MODEL)


@pytest.mark.parametrize("stage", ["import", "program", "kernels"])
def test_running_out_of_memory_is_not_an_internal_error(stage, monkeypatch):
    def exhausted(*args, **kwargs):
        raise MemoryError

    home, attribute, where = STAGES[stage]
    monkeypatch.setattr(home, attribute, exhausted)
    monkeypatch.setattr(bundle_cache, "read_cached_bundle", lambda key: None)
    with pytest.raises(CompileError, match=f"out of memory {where}"):
        aotc.compile(MODEL)


def test_an_internal_error_without_a_report_is_still_raised(monkeypatch, tmp_path):
    real = pipeline._dump_ir

    def dump(options, name, text):
        if name.endswith("-lower.txt"):
            raise planted
        real(options, name, text)

    monkeypatch.setattr(pipeline, "_dump_ir", dump)
    planted = OSError(errno.EACCES, "no way", "19-lower.txt")
    with pytest.raises(CompileError, match=r"19-lower\.txt: error: no way"):
        aotc.compile(MODEL, dump_ir=str(tmp_path))
    planted = KeyError("planted")
    with pytest.raises(InternalError, match="in the report on lowering: KeyError: 'planted'"):
        aotc.compile(MODEL, dump_ir=str(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_not_an_internal_error(number, monkeypatch, tmp_path):
    def write_text(path, text):
        raise OSError(number, "no way", str(path))

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises(CompileError, match=r"01-inline\.txt: error: no way"):
        aotc.compile(MODEL, dump_ir=str(tmp_path))


def test_an_internal_error_needs_no_writable_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(aotc.lowering.lower, "bufferize", broken)
    monkeypatch.setattr("aotc.guard.report_folder", lambda keep: str(tmp_path / "m.mlir"))
    (tmp_path / "m.mlir").write_text(MODEL)
    with pytest.raises(InternalError, match=r"'planted' .and nothing could be written about it"):
        aotc.compile(MODEL)


@pytest.mark.parametrize("error", [KeyboardInterrupt, BrokenPipeError])
def test_interrupts_are_not_wrapped(error, monkeypatch):
    def interrupted(*args, **kwargs):
        raise error

    monkeypatch.setattr(aotc.lowering.lower, "bufferize", interrupted)
    with pytest.raises(error):
        aotc.compile(MODEL)


def test_lint_and_check_report_broken_stages(monkeypatch, tmp_path, capsys):
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    for command in ("lint", "check"):
        monkeypatch.setattr(aotc.lowering.lower, "bufferize", broken)
        monkeypatch.setattr(sys, "argv", ["aotc", command, str(path)])
        with pytest.raises(SystemExit) as ended:
            main.main()
        assert ended.value.code == 2
        assert "internal error: while assigning storage of @main: KeyError" in capsys.readouterr().err


def test_tools_report_their_internal_errors(monkeypatch):
    monkeypatch.setattr("aotc.tools.lint._lint_row", broken)
    with pytest.raises(InternalError, match="while reporting what becomes of the ops"):
        lint(MODEL)
    monkeypatch.setattr("aotc.tools.check.interpret", broken)
    monkeypatch.setattr(Checker, "run", lambda *_: [])
    with pytest.raises(InternalError, match="while comparing with the reference"):
        Checker(aotc.frontend.mlir.fetch(MODEL), Options()).check([np.ones((4, 4), "f4")] * 2)


def test_an_internal_error_of_a_command_exits_with_2(monkeypatch, capsys):
    monkeypatch.setattr("aotc.targets.host_target", broken)
    monkeypatch.setattr(sys, "argv", ["aotc", "targets"])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    assert "internal error: in aotc targets: KeyError: 'planted'" in (text := capsys.readouterr().err)
    assert "to repeat: aotc targets" in text


# ---------------------------------------------------------------- the user's own function


class Mine(Exception):
    pass


def test_an_exception_of_the_traced_function_is_shown():
    def helper(x):
        raise Mine("the batch is odd\nsecond line")

    def model(x):
        return jnp.sin(helper(x))

    with pytest.raises(CompileError) as caught:
        aotc.compile(model, np.ones(3, "f4"))
    place = f"{__file__}:{helper.__code__.co_firstlineno + 1}"
    assert f"{place}: error: jax.export cannot export the function: Mine: the batch is odd" in str(caught.value)
    assert isinstance(caught.value.__cause__, Mine)
    assert any(f.name == "helper" for f in traceback.extract_tb(caught.value.__cause__.__traceback__))


@pytest.mark.parametrize("error", [RecursionError, KeyError, ZeroDivisionError, NotImplementedError])
def test_any_exception_of_the_traced_function_is_a_user_error(error):
    def model(x):
        raise error("mine")

    with pytest.raises(CompileError, match=f"{error.__name__}: .*mine"):
        aotc.compile(model, np.ones(3, "f4"))


def test_arguments_that_jax_cannot_flatten_are_refused():
    with pytest.raises(CompileError, match="cannot export the function"):
        aotc.compile(lambda d: d, {1: np.ones(3, "f4"), "a": np.ones(3, "f4")})


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"jobs": "many"}, "jobs is 'many'"),
        ({"target": 3}, "target is 3"),
        ({"bisect": "2"}, "bisect is '2'"),
        ({"weights": None}, "weights is None"),
        ({"specialize": {"b": 3}}, "specialize is"),
        ({"specialize": [3]}, "specialize is"),
        ({"specialize": {3: (1,)}}, "specialize is"),
        ({"specialize": {"b": (1.5,)}}, "specialize is"),
        ({"specialize": {"b": "18"}}, "specialize is"),
        ({"specialize": {"b": iter((1, 8))}}, "specialize is"),
        ({"target": Path("cpu")}, "target is PosixPath"),
        ({"stop_after": Path("cse")}, "stop_after is PosixPath"),
        ({"dump_ir": b"ir"}, "dump_ir is b'ir'"),
        ({"jobs": 2.0}, "jobs is 2.0"),
        ({"progress": "yes"}, "progress is"),
    ],
)
def test_options_of_wrong_types_are_refused(options, part):
    with pytest.raises(CompileError, match=part):
        aotc.compile(MODEL, **options)


def test_sizes_may_be_numpy_integers(monkeypatch, quick_kernels):
    text = MODEL.replace("4x4", "?x4").replace("%x: tensor<?x4xf32>", '%x: tensor<?x4xf32> {jax.arg_info = "x"}')
    dim = next(iter(import_model(text).functions.values())).body.params[0].type.shape[0]
    sizes = {str(dim): np.array([1, 8], "int8")}
    assert aotc.compile(text, specialize=sizes) == aotc.compile(text, specialize={str(dim): [np.int64(1), 8]})


@pytest.mark.parametrize("package", ["numba", "llvmlite"])
def test_a_missing_package_is_named(package, tmp_path):
    """Numba compiles every kernel for a CPU."""
    path = tmp_path / "m.mlir"
    path.write_text(MODEL)
    code = (
        f"import sys; sys.modules[{package!r}] = None; import aotc\n"
        "from aotc.diagnostics import CompileError\n"
        "try: aotc.compile(sys.argv[1], cache=False)\n"
        "except CompileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert f"this needs {package}, which is not installed" in done.stdout
    assert "[compile]'" in done.stdout
