"""A linker that is started before its objects are there: the same bytes, whatever happens in the meantime."""

import os
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("numba")

import numpy as np
from kernels.jobs.compilers import build_library

import aotc
from aotc import pipeline
from aotc.diagnostics import UNKNOWN, CompileError, InternalError
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cpu import build, find_linker, link
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.cpu.link import Linker
from aotc.options import Options
from aotc.targets import TARGETS, host_target

pytestmark = pytest.mark.cpu

TEXT = """def double(a: "f32[8]", /, o: "f32[8]", *, grid: "1"):
    for i in range(0, 8):
        o[i] = a[i] + a[i]
"""
FOREIGN = TARGETS["cpu:aarch64"] if host_target().triple.startswith("x86") else TARGETS["cpu:x86-64-v3"]


def objects(target):
    return [compile_kernel(parse_kernel(TEXT), target), link.function_table_object(["double"], target)]


def linked(linker, given):
    linker.send_objects(given)
    return linker.linked_library()


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """An empty folder for all temporary files."""
    (tmp_path / "a b").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a b"))
    return tmp_path / "a b"


def other_linkers():
    """Return commands of linkers that a machine may have besides the one that is taken."""
    named = (("ld.bfd",), ("ld.lld",), ("ld.gold",), ("ld.mold",), ("cc", "-nostdlib"))
    flag = {True: "-Wl,--build-id=none", False: "--build-id=none"}
    return [(path, "-shared", *rest, flag[bool(rest)]) for name, *rest in named if (path := shutil.which(name))]


def linked_plainly(command, given, folder):
    for n, data in enumerate(given):
        (folder / f"{n}.o").write_bytes(data)
    subprocess.run([*command, "-o", "out.so", "0.o", "1.o"], cwd=folder, check=True, timeout=60)
    return (folder / "out.so").read_bytes()


@pytest.mark.parametrize("target", [host_target(), FOREIGN], ids=["own", "foreign"])
def test_a_linker_started_early_gives_the_same_bytes(target, tmp_path):
    given = objects(target)
    assert link.link_shared_library(given, target) == linked_plainly(
        find_linker.linker_command(target == host_target()), given, tmp_path
    )


@pytest.mark.parametrize("command", other_linkers(), ids=lambda c: os.path.basename(c[0]))
def test_every_linker_makes_its_own_bytes(command, tmp_path, temporary, monkeypatch):
    """Whether it waits or, as gold does, does not."""
    given = objects(host_target())
    monkeypatch.setattr(find_linker, "linker_command", lambda native: command)
    with Linker(host_target()) as linker:
        linker.start()
        time.sleep(0.1)
        made = linked(linker, given)
    (tmp_path / "plain").mkdir()
    assert made == linked_plainly(command, given, tmp_path / "plain")


def test_a_started_linker_waits_for_its_objects(temporary):
    given = objects(host_target())
    with Linker(host_target()) as linker:
        linker.start()
        time.sleep(0.1)
        (process,) = link._WAITING
        assert process.poll() is None
        assert list(temporary.iterdir()) == []
        assert linked(linker, given)[:4] == b"\x7fELF"
        assert process.returncode == 0
    assert not link._WAITING
    (home,) = temporary.iterdir()
    assert list(home.iterdir()) == []


def test_without_a_pipe_file_the_linker_starts_last(monkeypatch):
    given = objects(host_target())
    made = link.link_shared_library(given, host_target())
    monkeypatch.setattr(link, "_version_script_option", lambda command: "--version-script=/nowhere/stdin")
    assert link.link_shared_library(given, host_target()) == made


def test_a_forked_child_does_not_delay_the_linker():
    given = objects(host_target())
    with Linker(host_target()) as linker:
        linker.start()
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        try:
            begin = time.monotonic()
            linked(linker, given)
            assert time.monotonic() - begin < 10
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_the_linker_ends_if_compilation_fails(error, temporary, monkeypatch):
    seen = []

    def fails(compilation, meanwhile):
        meanwhile()
        seen.extend(link._WAITING)
        raise error

    monkeypatch.setattr(build.Compilation, "finish", fails)
    with pytest.raises(error):
        build_library([parse_kernel(TEXT)], host_target(), Options(cache=False))
    (process,) = seen
    assert process.returncode is not None
    assert process.stdin.closed
    assert not link._WAITING
    assert list(temporary.iterdir()) == []


def test_a_full_disk_leaves_no_process_and_no_file(temporary, monkeypatch):
    def full(self, data):
        raise OSError(28, "no space left", str(self))

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with Linker(host_target()) as linker:
        process = linker.start()
        with pytest.raises(OSError, match="no space left"):
            linked(linker, [b""])
    assert process.returncode is not None
    (home,) = temporary.iterdir()
    assert list(home.iterdir()) == []


def test_a_linker_that_ends_early_or_fails_is_reported_once(temporary):
    with Linker(host_target()) as linker:
        process = linker.start()
        process.kill()
        with pytest.raises(InternalError, match=r"ld.* failed: .*0\.o"):
            linked(linker, [b"no object"])


KILLED = f"""
import os, signal, sys
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cpu import build, find_linker, link
from aotc.options import Options
from aotc.targets import host_target
from kernels.jobs.compilers import build_library

def killed(compilation, meanwhile):
    meanwhile()
    (process,) = link._WAITING
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

build.Compilation.finish = killed
build_library([parse_kernel({TEXT!r})], host_target(), Options(cache=False))
"""


def test_the_linker_ends_if_its_caller_is_killed(temporary):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == -9, done.stderr
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{int(done.stdout)}/cwd") and time.monotonic() < end:  # a zombie has none
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{int(done.stdout)}/cwd")
    assert list(temporary.iterdir()) == []


def test_a_missing_linker_is_reported_before_kernels_are_compiled(monkeypatch):
    def none(native):
        raise CompileError.at(UNKNOWN, "no linker found")

    monkeypatch.setattr(find_linker, "linker_command", none)
    monkeypatch.setattr(build.Compilation, "finish", lambda *_: pytest.fail("compiled"))
    with pytest.raises(CompileError, match="no linker found"):
        build_library([parse_kernel(TEXT)], host_target(), Options(cache=False))


def test_a_missing_linker_is_reported_before_the_model_is_lowered(monkeypatch):
    def none(native):
        raise CompileError.at(UNKNOWN, "no linker found")

    monkeypatch.setattr(find_linker, "linker_command", none)
    monkeypatch.setattr(pipeline, "lower", lambda *_: pytest.fail("lowered"))
    with pytest.raises(CompileError, match="no linker found"):
        aotc.compile(lambda x: x + 1, np.ones(3, np.float32), cache=False)
