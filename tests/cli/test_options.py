"""Options: places of devices, sizes of memory, IREE's spellings, and what the summary says of them."""

import json
import re
import warnings

import jax
import numpy as np
import pytest
from lowering.test_devices import stages
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import AotcWarning
from aotc.options import RENAMED, Options
from aotc.pipeline import PASSES, checked_options
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc_cli.main import app
from aotc_cli.shared.device_option import parse_places
from aotc_cli.shared.iree_options import translate_iree_options
from aotc_cli.shared.units import working_memory

pytestmark = pytest.mark.cpu

KNOWN = frozenset(
    {"--device", "--default-device", "--stack-limit", "--shared-memory-limit", "--opt-level", "--annotate-affinities"}
)


def run(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A model on two devices, compiled by the command line in IREE's words, and what the summary said."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "m.mlir").write_text(stages())
    devices = ("--iree-hal-target-device=d0=local[0]", "--iree-hal-target-device", "d1=local[1]")
    done = run("compile", folder / "m.mlir", "-o", folder / "m.vmfb", *devices, "--stack-limit=32kB")
    assert done.exit_code == 0, done.output
    return folder / "m.vmfb", done.output


def test_the_summary_names_devices(two):
    assert "on d0 and d1 with 1 transfer, memory" in two[1]


def test_the_summary_names_the_minimum_cpu(tmp_path):
    path, model = tmp_path / "m.vmfb", tmp_path / "m.mlir"
    model.write_text("func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    several = run("compile", model, "-o", path, "--target=cpu:x86-64-v4,cpu:x86-64-v3").output
    assert several.splitlines()[-2:] == [
        "runs on cpu:x86-64-v3: Intel Haswell, AMD Zen or later", "--portable compiles for other machines too",
    ]  # fmt: skip
    assert "runs on cpu:aarch64: needs asimd\n" in run("compile", model, "-o", path, "--target=cpu:aarch64").output
    assert "runs on" not in run("compile", model, "-o", path, "--portable").output
    assert run("compile", model, "-o", path, "-q").output == ""


def test_inspect_names_the_devices(two):
    (variant,) = json.loads(run("inspect", two[0], "--json").output)["variants"]
    target = variant["target"]
    found = {name: (row["target"], row["place"]) for name, row in variant["devices"].items()}
    assert found == {f"d{n}": (target, f"cpu:{n}") for n in range(2)}
    assert f"d1: {target} (cpu:1)" in " ".join(run("inspect", two[0]).output.split())


def test_devices_are_bound_by_name(two):
    named = ("--device", "d0=cpu:3", "--device", "d1=cpu:1")
    for command in (("run", "--random"), ("bench", "--seconds=0"), ("profile", "-q", "-o", two[0].parent / "r.json")):
        assert run(command[0], two[0], *command[1:], *named).exit_code == 0
        refused = run(command[0], two[0], *command[1:], "--device", "cpu:3")
        assert "the model names 2" in str(refused.exception)


def test_device_options_are_parsed_by_name_or_order():
    assert parse_places([]) is None
    assert parse_places(["cuda:0"]) == "cuda:0"
    assert parse_places(["cpu:0", "cuda:0"]) == ["cpu:0", "cuda:0"]
    assert parse_places(["d0=cpu:0", "d1=cuda:0"]) == {"d0": "cpu:0", "d1": "cuda:0"}
    for texts in (["d0=cpu:0", "cpu:1"], ["d0=cpu:0", "d0=cpu:1"], ["=cpu"]):
        with pytest.raises(aotc.CallError, match="cannot read --device"):
            parse_places(texts)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--iree-hal-target-device=a=local[1]"], ["--device=a=cpu"]),
        (["--iree-hal-target-device", "b=cuda:sm_90"], ["--device=b=cuda:sm_90"]),
        (["--iree-hal-default-device=a"], ["--default-device=a"]),
        (["--iree-llvmcpu-stack-allocation-limit", "4096"], ["--stack-limit=4096"]),
        (["--iree-llvmgpu-shared-memory-limit=4096"], ["--shared-memory-limit=4096"]),
        (["--iree-opt-level=O3"], ["--opt-level=3"]),
        (["--iree-dispatch-creation-enable-aggressive-fusion"], ["--opt-level=3"]),
        (["--iree-dispatch-creation-enable-aggressive-fusion=false", "-q"], ["-q"]),
        (["--fuse=aggressive"], ["--opt-level=3"]),
        (["--annotate-input-affinities"], ["--annotate-affinities"]),
        (["--iree-stream-annotate-input-affinities=true"], ["--annotate-affinities"]),
        (["m.mlir", "-O2", "--", "--fuse=aggressive"], ["m.mlir", "-O2", "--", "--fuse=aggressive"]),
    ],
)
def test_iree_spellings_of_options_are_accepted(theirs, ours):
    assert list(translate_iree_options(theirs, KNOWN)) == ours
    assert not any("iree" in arg or "fuse" in arg for arg in ours[:3])
    if "--" not in theirs:
        assert list(translate_iree_options(theirs, frozenset())) == theirs


def test_invalid_iree_spellings_are_refused():
    for args in (["--fuse=x"], ["--annotate-input-affinities=maybe"]):
        done = run("compile", "m.mlir", "-o", "m.vmfb", *args)
        assert done.exit_code == 2
        assert "expected" in done.output
    assert "iree" not in run("compile", "--help").output


@pytest.mark.parametrize("name", ["memory_limit", "stack_limit", "shared_memory_limit"])
def test_memory_limits_are_parsed_as_bytes(name):
    texts = {"64MB": 64_000_000, "1.5 kB": 1500, "64MiB": 1 << 26, "2 ki": 2048, "1.5Gi": 3 << 29, "0": 0}
    for text, size in {**texts, np.int64(7): 7}.items():
        assert getattr(checked_options(Options(), {name: text}), name) == size
    for wrong in (True, "64MX", "", -1, 1.5, None, 10**30):
        with pytest.raises(aotc.CompileError, match=f"{name} is "):
            checked_options(Options(), {name: wrong})
    option = f"--{name.replace('_', '-')}"
    assert option in run("compile", "m.mlir", "-o", "m.vmfb", f"{option}=3XB").output


@pytest.mark.parametrize("name", ["opt_level", "jobs", "bisect", "max_transfers"])
def test_booleans_are_refused_as_numbers(name):
    with pytest.raises(aotc.CompileError, match=f"{name} is True"):
        checked_options(Options(), {name: True})
    with pytest.raises(aotc.CompileError, match="specialize is"):
        checked_options(Options(), {"specialize": {"b": (True,)}})


def test_the_summary_counts_threads_within_the_memory_limit(monkeypatch):
    monkeypatch.setenv("AOTC_NUM_THREADS", "4")
    row = {"arena": 4_000_000, "scratch": 500_000}
    assert working_memory([{"memory": {"f": row}}]) == "memory peak 6.0 MB with 4 threads"
    assert working_memory([{"memory": {"f": row}, "memory_limit": 5_400_000}]) == "memory peak 5.0 MB with 2 threads"
    assert working_memory([{"memory": {"f": row}, "memory_limit": 1}]) == "memory peak 4.5 MB with 1 thread"


def test_dir_lists_public_names():
    assert {"DeviceArray", "Fence", "upgrade", "compile"} <= set(dir(aotc))


def test_a_portable_bundle_has_code_for_all_cpus(tmp_path):
    path, model = tmp_path / "m.vmfb", tmp_path / "m.mlir"
    model.write_text("func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }")
    assert run("compile", model, "-o", path, "--portable").exit_code == 0
    cpus = [name for name, t in TARGETS.items() if t.kind == "cpu"]
    assert [v["target"] for v in open_bundle(path.read_bytes()).manifest["variants"]] == cpus
    result = run("compile", model, "-o", path, "--portable", "--target=cpu:x86-64-v3")
    assert result.exit_code == 2
    assert "leave out" in result.output


@pytest.mark.parametrize("old", RENAMED)
def test_a_former_name_of_a_pass_is_accepted_with_a_note(old):
    assert RENAMED[old] in {step.name for step in PASSES}
    with pytest.warns(AotcWarning, match=f"the pass {old} is now called {RENAMED[old]}"):
        assert checked_options(Options(print_after=old)).print_after == RENAMED[old]


@pytest.fixture(scope="module")
def added(tmp_path_factory):
    path = tmp_path_factory.mktemp("added") / "m.vmfb"
    aotc.compile(lambda x: x + 1, np.zeros(4, "f"), output=path)
    return path


@pytest.mark.parametrize("option", ["--output=@{}/y.npy", "--output=@{}/y.npz", "--trace-dispatch-tensors={}/trace"])
def test_run_refuses_an_output_without_a_folder_before_the_call(option, added, tmp_path, monkeypatch):
    from aotc_cli.commands import run

    monkeypatch.setattr(run, "_call_function", lambda *_: pytest.fail("the function was called"))
    folder = tmp_path / "nodir"
    done = CliRunner().invoke(app, ["run", str(added), "--zeros", option.format(folder)])
    assert isinstance(done.exception, aotc.CallError), done.output
    assert f"there is no folder {folder}" in str(done.exception)
    assert not folder.exists()


class TestWeightsInAnotherFolder:
    """A bundle has the name of its weights file without the folder."""

    TEXT = "the bundle expects w.safetensors in its own folder: move {} next to {}, or set AOTC_WEIGHTS_PATH={}"

    @pytest.fixture
    def paths(self, tmp_path, monkeypatch):
        monkeypatch.delenv("AOTC_WEIGHTS_PATH", raising=False)
        (tmp_path / "sub").mkdir()
        return tmp_path / "w.vmfb", tmp_path / "sub" / "w.safetensors"

    def test_the_command_warns(self, paths, tmp_path):
        output, weights = paths
        scale = np.arange(4096, dtype="f")
        exported = jax.export.export(jax.jit(lambda x: x * scale))(np.zeros(4096, "f"))
        (tmp_path / "m.jaxexp").write_bytes(exported.serialize())
        words = ["compile", str(tmp_path / "m.jaxexp"), "-o", str(output), "-q"]
        done = CliRunner().invoke(app, [*words, f"--weights={weights}"])
        assert done.exit_code == 0, done.output
        assert done.stderr == f"warning: {self.TEXT.format(weights, output, weights.parent)}\n"
        done = CliRunner().invoke(app, [*words, f"--weights={output.parent / 'w.safetensors'}"])
        assert (done.exit_code, done.stderr) == (0, "")

    @pytest.mark.parametrize("bind", [(), ("w",)])
    def test_compile_warns(self, paths, bind, monkeypatch):
        output, weights = paths
        scale = np.arange(4096, dtype="f")
        model = (lambda w, x: w * x) if bind else (lambda x: x * scale)
        examples = (scale, scale) if bind else (scale,)
        with pytest.warns(aotc.AotcWarning, match=re.escape(self.TEXT.format(weights, output, weights.parent))):
            aotc.compile(model, *examples, bind=bind, weights=weights, output=output)
        with pytest.raises(aotc.BundleError, match="is missing"):
            aotc.load(output)(scale)
        monkeypatch.setenv("AOTC_WEIGHTS_PATH", str(weights.parent))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            aotc.compile(model, *examples, bind=bind, weights=weights, output=output)
        np.testing.assert_array_equal(aotc.load(output)(scale), scale * scale)
