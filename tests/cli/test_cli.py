"""The command line: what it prints, what it writes, how it exits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support import tiny
from typer.main import get_command

from aotc.bundle import Bundle
from aotc.tools.largest_error import largest_error
from aotc.tools.sample_arguments import dim_value
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import CallError
from aotc_cli import main as cli_main
from aotc_cli.shared.inputs import from_storage, parse_values, to_storage
from aotc_cli.shared.outputs import array_text, check_results, elided_text

pytestmark = pytest.mark.ir
GOLDEN = Path(__file__).parents[1] / "golden_bundles"


@pytest.fixture
def aotc(monkeypatch, capsys):
    """Run the command line in this process; return (exit code, stdout, stderr)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli_main.main()
        text = capsys.readouterr()
        return stopped.value.code or 0, text.out, text.err

    return call


@pytest.fixture
def bundle(tmp_path):
    """Path of the tiny bundle."""
    path = tmp_path / "tiny.vmfb"
    path.write_bytes(tiny.bundle())
    return path


def argument(dtype, *dims):
    """An expected argument."""
    return {"name": "x", "dtype": dtype, "dims": list(dims)}


# ---------------------------------------------------------------- input syntax

TEXTS = [
    ("2x3xf32=1,2,3,4,5,6", "f32", [[1, 2, 3], [4, 5, 6]]),
    ("2x3xf32=1 2 3 4 5 6", "f32", [[1, 2, 3], [4, 5, 6]]),
    ("2x2xi32=[1 2][3 4]", "i32", [[1, 2], [3, 4]]),
    ("2x2xsi32=[[1,2],[3,4]]", "i32", [[1, 2], [3, 4]]),
    ("&2xui8=255 0", "u8", [255, 0]),
    ("2xi8=255 0", "u8", [255, 0]),
    ("4xi32=7", "i32", [7, 7, 7, 7]),
    ("3xf32", "f32", [0, 0, 0]),
    ("f32=3", "f32", 3),
    ("3.5", "f32", 3.5),
    ("-inf", "f64", -np.inf),
    ("2xf32=nan 0x10", "f32", [np.nan, 16]),
    ("3xi1=1 0 true", "i1", [True, False, True]),
    ("2xcomplex<f32>=1+2j (3,4)", "c64", [1 + 2j, 3 + 4j]),
    ("0x3xf32=", "f32", np.zeros((0, 3))),
    ("2xi64=9223372036854775807 -1", "i64", [2**63 - 1, -1]),
    ("2xui64=18446744073709551615 1", "u64", np.array([2**64 - 1, 1], "u8")),
]


@pytest.mark.parametrize(("text", "dtype", "want"), TEXTS)
def test_input_values_are_parsed(text, dtype, want):
    (got,) = parse_values([text], [argument(dtype)])
    np.testing.assert_array_equal(got, np.array(want, got.dtype))
    assert got.shape == np.shape(want)


@pytest.mark.parametrize("dtype", ["bf16", "f8E4M3FN", "i4", "u4", "f16"])
def test_small_dtypes_are_parsed_from_text(dtype):
    (got,) = parse_values([f"3x{dtype}=1 2 3"], [argument(dtype, 3)])
    np.testing.assert_array_equal(got.astype("f4"), [1, 2, 3])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("2xf32=1,2,3", "--input=2xf32=1,2,3: wrong number of values"),
        ("2xf16=1,2", "wrong dtype"),
        ("2xf32=one,2", "cannot read"),
        ("rubbish", "cannot read"),
        ("2xf99=1", "cannot read"),
        ("@/nonexistent.npy", "No such file"),
    ],
)
def test_invalid_input_values_are_refused(text, part):
    with pytest.raises(CallError, match=part):
        parse_values([text], [argument("f32", 2)])


def test_out_of_range_and_surplus_values_are_refused():
    with pytest.raises(CallError, match="outside -128"):
        parse_values(["2xi8=1 300"], [argument("i8", 2)])
    with pytest.raises(CallError, match="one too many"):
        parse_values(["f32=1", "f32=2"], [argument("f32")])


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (ml_dtypes.bfloat16, "uint16"),
        (ml_dtypes.float8_e4m3fn, "uint8"),
        (ml_dtypes.int4, "int8"),
        (ml_dtypes.uint4, "int8"),
        ("complex64", "complex64"),
        ("bool", "bool"),
    ],
)
def test_extension_dtypes_round_trip_through_npy(tmp_path, dtype, stored):
    from aotc.vmfb.dtypes import from_numpy

    values = np.array([1, 0, 3]).astype(dtype)
    np.save(tmp_path / "x.npy", to_storage(values))
    loaded = np.load(tmp_path / "x.npy")
    assert loaded.dtype == stored
    back = from_storage(loaded, from_numpy(values.dtype))
    assert back.dtype == values.dtype
    np.testing.assert_array_equal(back.astype("c8"), values.astype("c8"))


def test_an_npz_file_gives_several_arguments(tmp_path):
    np.savez(tmp_path / "x.npz", a=np.ones(2, "f4"), b=np.zeros(3, "i4"))
    a, b = parse_values([f"@{tmp_path}/x.npz"], [argument("f32", 2), argument("i32", 3)])
    assert a.shape == (2,)
    assert b.dtype == "i4"


def test_dim_options_are_parsed():
    assert dim_value("2*n + 1", {"n": 4}) == 9
    assert dim_value("max(n // 3, 7 % 4)", {"n": 30}) == 10
    with pytest.raises(CallError, match="evaluate dim"):
        dim_value("__import__('os')", {})


def test_array_text_is_in_the_syntax_of_iree():
    assert array_text(np.float32([[1, 2.5], [3, 4]]), 100) == "2x2xf32=[1 2.5][3 4]"
    assert array_text(np.int32(7), 100) == "i32=7"
    assert array_text(np.array([True, False]), 100) == "2xi1=1 0"
    assert array_text(np.arange(5, dtype="i8"), 3) == "5xi64=0 1 2..."
    assert array_text(np.ones(1, ml_dtypes.bfloat16), 3) == "1xbf16=1"
    assert array_text(np.zeros(0, "f4"), 3) == "0xf32="


def test_elided_text_has_type_and_last_elements():
    assert elided_text(np.float32([[1, 2.5], [3, 4]]), 80) == "2x2xf32 =\n[[1.  2.5]\n [3.  4. ]]"
    assert elided_text(np.arange(5000), 80).endswith("4997 4998 4999]")
    assert elided_text(np.ones(1, ml_dtypes.bfloat16), 80) == "1xbf16 = [1.]"


def test_check_results_reports_the_largest_errors():
    (error,) = check_results([np.float32([1, np.nan])], [np.float32([1.00001, np.nan])], None, None)
    assert error.absolute == pytest.approx(1e-5, rel=0.1)
    text = "largest error 2, 0.5 of the largest value; largest relative error 1"
    assert str(largest_error(np.float32([0, 2]), np.float32([1e-3, 4]))) == text
    assert largest_error(np.float32([np.inf]), np.float32([1])).absolute == np.inf
    check_results([np.float32([1])], [None], None, None)
    with pytest.raises(CallError, match=r"differs in 1 of 2 elements, first at \[1\]"):
        check_results([np.int32([1, 2])], [np.int32([1, 3])], None, None)


# ---------------------------------------------------------------- commands


def test_run_prints_results(aotc, bundle):
    code, out, _ = aotc("run", bundle, "--input=4xf32=1,2,3,4", "--input=4xf32=1")
    assert (code, out) == (0, "result[0]: 4xf32=2 3 4 5\n")


def test_run_reads_writes_and_compares_files(aotc, bundle, tmp_path):
    x, y = tmp_path / "x.npy", tmp_path / "y.npy"
    np.save(x, np.arange(4, dtype="f4"))
    code, out, _ = aotc("run", bundle, f"--input=@{x}", f"--input=@{x}", f"--output=@{y}")
    assert (code, out) == (0, "")
    np.testing.assert_array_equal(np.load(y), [0, 2, 4, 6])
    both = (f"--input=@{x}", f"--input=@{x}")
    code, out, _ = aotc("run", bundle, *both, f"--expected_output=@{y}")
    assert code == 0
    assert out.splitlines()[-2:] == [
        "result[0]: no error", "[SUCCESS] all function outputs matched their expected values.",
    ]  # fmt: skip
    code, _, err = aotc("run", bundle, *both, "--expected_output=4xf32=0 2 4 7")
    assert code == 1
    errors = "largest error 1, 0.143 of the largest value; largest relative error 0.143"
    assert f"result 0 differs in 1 of 4 elements, first at [3]; {errors}" in err


def test_run_takes_the_size_of_a_symbolic_dim(aotc, bundle):
    code, out, _ = aotc("run", bundle, "--function=grow", "--zeros", "--dim=n=6", "--repeat=3")
    assert (code, out) == (0, "result[0]: 6xf32=0 0 0 0 0 0\n")


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--input=4xf32=1",), "wrong number of arguments"),
        (("--input=3xf32=1", "--input=4xf32=1"), "argument 0 (x) has the wrong shape"),
        (("--function=nope",), "no function 'nope'"),
        (("--function=grow", "--zeros", "--dim=n=2"), "n is 2, expected at least 4"),
        (("--threads=0", "--zeros"), "threads"),
    ],
)
def test_run_errors_exit_with_1_and_no_traceback(aotc, bundle, args, part):
    code, _, err = aotc("run", bundle, *args)
    assert code == 1
    assert part in err
    assert "Traceback" not in err


def test_inspect_shows_signature_and_sizes(aotc, bundle):
    code, out, _ = aotc("inspect", bundle)
    assert code == 0
    assert "main(x: f32[4], y: f32[4]) -> (f32[4])" in out
    code, out, _ = aotc("inspect", bundle, "--json")
    facts = json.loads(out)
    assert [k["name"] for k in facts["variants"][0]["kernels"]] == ["add", "scale", "count", "iota"]
    assert facts["bytes"] == bundle.stat().st_size
    assert all(16 <= k["code_bytes"] < 2000 for k in facts["variants"][0]["kernels"])


def test_dump_prints_kernels_programs_and_commands(aotc, bundle):
    code, out, _ = aotc("dump", bundle, "--bytecode", "--command-buffers")
    assert code == 0
    assert "0: add(slot0, slot1, slot2) dims(4) x4 by 1" in out
    assert "0: add(slot0, slot0, slot2) dims(p0) xp0 by 1 then 1" in out
    assert "while slot2: condition" in out
    assert "case slot0 == 1" in out
    assert "submit cb0, []" in out
    code, _, err = aotc("dump", bundle, "--kernels")
    assert code == 1
    assert "no kernel text" in err


def test_verify_checks_segments_and_programs(aotc, bundle):
    code, out, _ = aotc("verify", bundle)
    assert code == 0
    assert "9 segments match" in out
    data = bytearray(bundle.read_bytes())
    data[-100] ^= 1
    bundle.write_bytes(data)
    code, _, err = aotc("verify", bundle)
    assert code == 1
    assert err


def test_bench_reports_latency(aotc, bundle):
    code, out, _ = aotc("bench", bundle, "--seconds=0.05", "--rounds=1", "--against", bundle)
    assert code == 0
    assert "p99" in out
    assert "times as long" in out


def test_targets_and_doctor_print_the_machine(aotc):
    code, out, _ = aotc("targets")
    assert code == 0
    assert "the default here" in out
    _, out, _ = aotc("doctor")
    assert "threads" in out
    assert "numpy" in out


@pytest.mark.parametrize("name", list(get_command(cli_main.app).commands))
def test_help_has_examples(aotc, name):
    code, out, _ = aotc(name, "--help")
    assert code == 0
    assert f"aotc {name}" in out.split("Usage")[1].split("\n", 1)[1]


def test_usage_errors_exit_with_2(aotc):
    assert aotc("run")[0] == 2
    assert aotc("nonsense")[0] == 2
    assert aotc("--version")[0] == 0


def test_a_bundle_for_another_cpu_is_refused(aotc, tmp_path):
    manifest, segments = tiny.parts()
    manifest["variants"][0]["features"] = ["unobtainium"]
    path = tmp_path / "x.vmfb"
    write_bundle(path, manifest, segments)
    code, _, err = aotc("run", path, "--zeros")
    assert code == 1
    assert "this CPU lacks unobtainium" in err
    assert "compile with --portable, for all CPUs, or with --target for this machine" in err
    assert aotc("inspect", path)[0] == 0


def test_run_imports_no_compiler_and_no_other_command(bundle):
    code = (
        "import sys; sys.argv = ['aotc', 'run', sys.argv[1], '--zeros']\n"
        "from aotc_cli.main import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print(sorted({'jax', 'jaxlib', 'numba', 'llvmlite', 'rich', 'aotc.pipeline'} & set(sys.modules)))\n"
        "print([name for name in sys.modules if name.startswith('aotc_cli.commands.')])"
    )
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "['aotc_cli.commands.run']"]


def test_a_mistyped_command_suggests_the_nearest_command(aotc):
    code, _, err = aotc("rnu")
    assert code == 2
    assert "No such command 'rnu'. Did you mean 'run'?" in err


def test_a_command_without_its_packages_names_the_install_command(tmp_path):
    """`pip install --no-deps` is for `aotc.load`: every command says what it needs."""
    code = "import sys; sys.modules['typer'] = None; from aotc_cli.start import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    first, second = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (1, "")
    assert first == "error: the aotc command needs typer, which is not installed"
    assert second.startswith("  try: pip install ")


def test_a_command_does_not_collect_garbage_at_exit(bundle):
    """A collection finds only objects that the end of the process frees anyway, and takes a sixth of ``aotc run``."""
    code = (
        "import atexit, gc, sys; from aotc_cli.start import main; sys.argv = ['aotc', 'run', sys.argv[1], '--zeros']\n"
        "atexit.register(lambda: print(len(gc.get_objects()) < 0.01 * gc.get_freeze_count())); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, bundle], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"


def test_a_missing_extra_is_named(aotc, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'jax'", name="jax")

    monkeypatch.setattr("aotc.compile", refuse, raising=False)
    (tmp_path / "m.mlir").write_text("module {}")
    code, _, err = aotc("compile", tmp_path / "m.mlir", "-o", tmp_path / "m.vmfb")
    assert code == 1
    assert "[compile]'" in err


def test_the_bundle_cache_key_ignores_the_progress_bar(aotc, tmp_path, monkeypatch):
    """The bar holds locks, which cannot be copied; with it and without it the same bundle is read."""
    keys = []
    monkeypatch.setattr("aotc.driver.bundle_cache.cached_bundle", lambda *_: None)
    monkeypatch.setattr("aotc.driver.bundle_cache.read_cached_bundle", lambda key: keys.append(key) or tiny.bundle())
    (tmp_path / "m.mlir").write_text("module {}")
    for terminal in (True, False):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        code, out, _ = aotc("compile", tmp_path / "m.mlir", "-o", tmp_path / "m.vmfb")
        assert code == 0
        assert "4 kernels" in out
    assert len(keys) == 2
    assert keys[0] == keys[1]


def test_old_bundle_survives_a_full_disk(tmp_path, monkeypatch, aotc):
    path = tmp_path / "m.vmfb"
    path.write_bytes(b"old")
    monkeypatch.setattr("aotc.compile", lambda *a, **k: Bundle(1 << 20), raising=False)
    (tmp_path / "m.mlir").write_text("module {}")
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "import aotc; aotc.compile = lambda *a, **k: aotc.Bundle(1 << 20)\n"
        "from aotc_cli.main import main; main()"
    )
    args = [sys.executable, "-c", script, "compile", str(tmp_path / "m.mlir"), "-o", str(path)]
    done = subprocess.run(args, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 1
    assert "cannot write the bundle: File too large" in done.stderr
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.mlir", "m.vmfb"]
    code, _, err = aotc("compile", tmp_path / "m.mlir", "-o", tmp_path / "no" / "m.vmfb")
    assert code == 1
    assert "there is no folder" in err


# ---------------------------------------------------------------- options that do not fit

MISUSES = [
    (("run", "{}", "--random", "--dim=nosuch=3"), "no dim is called nosuch"),
    (("run", "{}", "--random", "--zeros"), "exclude each other"),
    (("run", "{}", "--random", "--seed=-1"), "--seed"),
    (("run", "{}", "--random", *["--output=-"] * 9), "9 for"),
    (("run", "{}", "--input=@{}"), "not an array file"),
    (("run", "{}", "--input=2xf32=@{}"), "wrong size"),
    (("dump", "{}", "--kernel=nosuch"), "no kernel has 'nosuch' in its name"),
    (("dump", "{}", "--target=nosuch"), "no target has 'nosuch' in its name"),
    (("compile", "m.mlir", "-o", "nosuch/out.vmfb"), "there is no folder nosuch"),
    (("compile", "m.mlir", "-o", "."), "is a folder"),
    (("compile", "m.mlir", "-o", "-"), "a bundle needs a file"),
    (("check", "m.mlir", "--target=cuda:sm_90"), "expected one CPU target"),
    (("compile", "m.mlir", "-o", "m.vmfb", "--bisect=-7"), "--bisect"),
]


@pytest.mark.parametrize(("words", "part"), MISUSES, ids=lambda x: " ".join(x) if isinstance(x, tuple) else "")
def test_contradicting_options_are_refused(words, part, aotc, bundle):
    code, _, err = aotc(*(word.format(bundle) for word in words))
    assert code != 0
    assert part in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "part"), [("x = 1\nraise ValueError('boom')\n", "ops.py:2: error: the file raises ValueError: boom"),
                       ("1 +", "SyntaxError"), ("\0", "SyntaxError"), (None, "No such file")]
)  # fmt: skip
def test_a_failing_custom_call_file_is_an_error(text, part, aotc, bundle, tmp_path):
    path = tmp_path / "ops.py"
    if text is not None:
        path.write_text(text)
    code, _, err = aotc("run", bundle, "--random", f"--custom-calls={path}")
    assert code == 1
    assert part in err
    assert "Traceback" not in err


def test_dump_asm_of_gpu_kernels_is_sass(aotc, tmp_path, monkeypatch):
    bundle = GOLDEN / "sm_90.vmfb"
    monkeypatch.setenv("PATH", str(tmp_path))
    places = ("/usr/local/cuda/bin", *(f"{p}/nvidia/cu13/bin" for p in sys.path))
    if not any(Path(place, "nvdisasm").exists() for place in places):
        code, _, err = aotc("dump", "--asm", bundle)
        assert code == 1
        assert "pip install nvidia-cuda-nvdisasm" in err
    tool = tmp_path / "nvdisasm"
    tool.write_text('#!/bin/sh\ntest -s "$2" && echo "$1 of a cubin"\n')
    tool.chmod(0o755)
    code, out, _ = aotc("dump", "--asm", "--kernel=k1", bundle)
    assert code == 0
    assert out.startswith("# k1_row\n-c of a cubin\n")
    assert "k0_add" not in out


def test_dump_asm_of_a_portable_gpu_target_is_ptx(aotc):
    code, out, _ = aotc("dump", "--asm", GOLDEN / "ptx.vmfb")
    assert code == 0
    assert out.startswith("# k0_")
    assert ".target sm_" in out


def test_dump_asm_works_for_a_bundle_with_two_memory_spaces(aotc):
    names = [k["name"] for k in open_bundle(str(GOLDEN / "mixed.vmfb")).manifest["variants"][0]["kernels"]]
    code, out, _ = aotc("dump", "--asm", f"--kernel={names[0]}", GOLDEN / "mixed.vmfb")
    assert code == 0
    assert out.startswith(f"# {names[0]}\n")
    assert "ret" in out
    assert names[1] not in out
