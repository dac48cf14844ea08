"""Where commands write: files that are whole, links, pipes and devices that stay, disks that are full."""

import os
import shlex
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import tiny

pytestmark = pytest.mark.ir

COMPILE = "import aotc; aotc.compile = lambda *a, **k: aotc.Bundle(open('m.vmfb', 'rb').read())\n"


@pytest.fixture
def call(tmp_path):
    """Run the command line as a process in a folder with ``m.vmfb``; ``compile`` makes a copy of it."""
    (tmp_path / "m.vmfb").write_bytes(tiny.bundle())
    (tmp_path / "m.mlir").write_text("module {}")

    def run(*words, before="", **more):
        program = f"{before}{COMPILE if words[0] == 'compile' else ''}from aotc_cli.main import main; main()"
        command = [sys.executable, "-c", program, *words]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, env=environment, timeout=120, **more)

    return run


def test_standard_output_has_only_the_bundle(call, tmp_path):
    done = call("compile", "m.mlir", "-o", "/dev/stdout", stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == tiny.bundle()
    assert b"4 kernels" in done.stderr
    with (tmp_path / "out").open("wb") as file:
        call("compile", "m.mlir", "-o", "/dev/stdout", stdout=file)
    assert (tmp_path / "out").read_bytes() == tiny.bundle()


def test_outputs_to_devices_and_pipes_do_not_replace_them(call, tmp_path):
    assert call("compile", "m.mlir", "-o", "/dev/null").returncode == 0
    assert os.path.exists("/dev/null")
    assert not os.path.isfile("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    assert call("compile", "m.mlir", "-o", "pipe").returncode == 0
    reader.join(60)
    assert found == [tiny.bundle()]
    assert (tmp_path / "pipe").is_fifo()


def test_an_output_device_that_is_full_is_an_error(call):
    done = call("compile", "m.mlir", "-o", "/dev/full")
    assert done.returncode == 1
    assert b"/dev/full: error: cannot write the bundle: No space left on device" in done.stderr
    assert not os.path.isfile("/dev/full")


def test_an_output_through_a_link_preserves_the_link(call, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/out.vmfb")
    (tmp_path / "lost").symlink_to("nowhere/out.vmfb")
    assert call("compile", "m.mlir", "-o", "link").returncode == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far" / "out.vmfb").read_bytes() == tiny.bundle()
    done = call("compile", "m.mlir", "-o", "lost")
    assert done.returncode == 1
    assert b"there is no folder" in done.stderr


GROW = ("run", "m.vmfb", "--function=grow", "--zeros", "--dim=n=300000")
ADD = ("run", "m.vmfb", "--input=4xf32=1,2,3,4", "--input=4xf32=1")


@pytest.mark.parametrize("form", ["@{}", "+{}", "{}"])
def test_results_on_a_full_disk_are_an_error(call, tmp_path, form):
    """No traceback, no file of 0 bytes, and the file that was there as it was."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
    for place, reason in (("/dev/full", b"No space left on device"), ("y.npy", b"File too large")):
        done = call(*GROW, f"--output={form.format(place)}", before=limit)
        assert done.returncode == 1, done.stderr
        assert done.stderr.strip() == place.encode() + b": error: " + reason
    assert not (tmp_path / "y.npy").exists()
    (tmp_path / "y.npy").write_bytes(b"old")
    assert call(*GROW, f"--output={form.format('y.npy')}", before=limit).returncode == 1
    assert (tmp_path / "y.npy").read_bytes() == b"old"
    assert sorted(os.listdir(tmp_path)) == ["m.mlir", "m.vmfb", "y.npy"]


def test_results_through_a_link_append_and_preserve_the_link(call, tmp_path):
    (tmp_path / "link.npy").symlink_to("y.npy")
    for form in ("@link.npy", "+link.npy"):
        assert call(*ADD, f"--output={form}").returncode == 0
    assert (tmp_path / "link.npy").is_symlink()
    with (tmp_path / "y.npy").open("rb") as file:
        assert [np.load(file).tolist() for _ in range(2)] == [[2, 3, 4, 5]] * 2


def test_file_names_that_are_not_utf_8_are_accepted(call, tmp_path):
    done = call("compile", "m.mlir", "-o", os.fsdecode(b"\xff.vmfb"), stdout=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / os.fsdecode(b"\xff.vmfb")).read_bytes() == tiny.bundle()
    assert b"udcff.vmfb: " in done.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", ["compile m.mlir -o made.vmfb", "inspect m.vmfb"])
def test_commands_work_with_closed_streams(call, tmp_path, closed, words):
    program = f"{COMPILE if words.startswith('compile') else ''}from aotc_cli.main import main; main()"
    command = shlex.join([sys.executable, "-c", program, *words.split()])
    done = subprocess.run(f"{command} {closed}", shell=True, cwd=tmp_path, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    if words.startswith("compile"):
        assert (tmp_path / "made.vmfb").read_bytes() == tiny.bundle()


def test_an_invalid_picture_path_is_refused_before_any_work(call):
    done = call("explain", "affinity", "m.mlir", "--picture=no/p.svg")
    assert done.returncode == 1
    assert done.stderr.startswith(b"no/p.svg: error: there is no folder no\n")


@pytest.mark.parametrize(
    "words", ["compile m.mlir -o ./m.mlir", "report m.vmfb -o m.vmfb", "update-weights m.vmfb w.st -o w.st"]
)
def test_an_output_never_replaces_its_input(call, tmp_path, words):
    (tmp_path / "w.st").write_bytes(b"weights")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    done = call(*words.split())
    assert done.returncode == 1
    assert b"error: the output would replace the input\n  try: another place with -o\n" in done.stderr
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_bundle_is_read_from_a_pipe(call):
    done = call("run", "/dev/stdin", *ADD[2:], input=tiny.bundle(), stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"result[0]: 4xf32=2 3 4 5\n"
