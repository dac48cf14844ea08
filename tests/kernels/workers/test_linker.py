"""A linker that is started before its objects are there: the same bytes, whatever happens in the meantime."""

import os
import subprocess
import time

import pytest

pytest.importorskip("numba")

from aotc.ir.loop_parser import parse_kernel
from aotc.kernels.cpu import build, link
from aotc.kernels.cpu.build import build_library
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.cpu.link import Linker
from aotc.options import Options
from aotc.targets import TARGETS, host

pytestmark = pytest.mark.cpu

TEXT = """def double(a: "f32[8]", /, o: "f32[8]", *, grid: "1"):
    for i in range(0, 8):
        o[i] = a[i] + a[i]
"""


def objects(target):
    return [compile_kernel(parse_kernel(TEXT), target), link.function_table(["double"], target)]


def is_waiting(process):
    return process.poll() is None


@pytest.mark.parametrize("target", [host(), TARGETS["cpu:aarch64"]], ids=["own", "foreign"])
def test_the_script_changes_no_byte(target, tmp_path):
    given = objects(target)
    command = link.linker(target == host())
    for n, data in enumerate(given):
        (tmp_path / f"{n}.o").write_bytes(data)
    plain = [*(word for word in command if "version-script" not in word), "-o", "out.so", "0.o", "1.o"]
    subprocess.run(plain, cwd=tmp_path, check=True, timeout=60)
    assert link.link(given, target) == (tmp_path / "out.so").read_bytes()


def test_it_waits_for_its_objects():
    given = objects(host())
    with Linker(host(), 2) as started:
        time.sleep(0.1)
        assert is_waiting(started._process)
        assert started.link(given)[:4] == b"\x7fELF"
    assert not link._WAITING


def test_a_forked_child_does_not_hold_it_up():
    given = objects(host())
    with Linker(host(), 2) as started:
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        try:
            begin = time.monotonic()
            started.link(given)
            assert time.monotonic() - begin < 10
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)


def test_it_ends_with_what_fails_before_it(monkeypatch):
    seen = []

    def fails(*_):
        seen.extend(link._WAITING)
        raise ZeroDivisionError

    monkeypatch.setattr(build, "compile_texts", fails)
    with pytest.raises(ZeroDivisionError):
        build_library([parse_kernel(TEXT)], host(), Options(cache=False))
    (process,) = seen
    assert not is_waiting(process)
    assert not link._WAITING


def test_its_folder_goes_with_it():
    with Linker(host(), 1) as started:
        folder = started._folder
        assert folder.exists()
    assert not folder.exists()
    assert not is_waiting(started._process)
