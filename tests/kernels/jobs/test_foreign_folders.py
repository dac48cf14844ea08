"""What a compiler process imports is what its parent imports, wherever it is started."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("numba")

from aotc.kernels import worker
from aotc.kernels.cpu import find_linker, link
from aotc.kernels.jobs import pool
from aotc.targets import TARGETS
from aotc.vmfb.host.children import python_command

pytestmark = pytest.mark.cpu

FAKES = ("aotc", "numba", "numpy", "msgpack", "llvmlite", "ziglang")
COMPILE = '''
import sys
import aotc, aotc.driver.assemble, aotc.kernels.cpu.build, aotc.kernels.cpu.link, jax, numba
import os
os.chdir(sys.argv[1])
text = """func.func @main(%x: tensor<5xf32>) -> tensor<5xf32> {
  %0 = stablehlo.sine %x : tensor<5xf32>
  return %0 : tensor<5xf32>
}"""
aotc.compile(text)
'''


@pytest.fixture
def fakes(tmp_path):
    """A folder with packages that must not be imported: each leaves a file."""
    for name in FAKES:
        folder = tmp_path / "fakes" / name
        folder.mkdir(parents=True)
        for part in ("__init__", "__main__"):
            (folder / f"{part}.py").write_text(f"open({str(tmp_path / name)!r}, 'w')\nraise SystemExit(7)\n")
    return tmp_path / "fakes"


def left(fakes):
    return sorted(p.name for p in fakes.parent.iterdir() if p.is_file())


@pytest.mark.parametrize("flag", ["-P", "-B"], ids=["installed", "interactive"])
def test_a_compiler_process_imports_nothing_from_the_working_folder(fakes, tmp_path, flag):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOTC_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, flag, "-c", COMPILE, str(fakes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr, left(fakes)) == (0, "", [])


KERNEL = """def double(a: "f32[8]", /, o: "f32[8]", *, grid: "8", flops: "8", bytes: "64"):
    for i in parallel(0, 8):
        o[i] = exp(a[i]) + a[i]
"""


def test_a_compiler_process_outlives_the_working_folder(tmp_path, monkeypatch):
    pytest.importorskip("numba_cuda")
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    process = pool._spawn_compiler_process()
    folder.rmdir()
    request = {"id": 0, "target": worker.target_fields(TARGETS["cuda:sm_90a"]), "text": KERNEL}
    answer, process = pool.ask_compiler_process(process, request, ())
    process.kill()
    process.wait()
    assert "object" in answer or "nvjitlink" in answer["error"], answer


def test_a_child_has_what_its_parent_added_to_the_path(fakes, tmp_path, monkeypatch):
    (tmp_path / "added:here").mkdir()
    (tmp_path / "added:here" / "only_here.py").write_text("name = 'found'")
    monkeypatch.syspath_prepend(str(tmp_path / "added:here"))
    monkeypatch.syspath_prepend("")
    command = python_command("import only_here, sys; print(only_here.name, *sys.argv[1:])", "a", "b")
    done = subprocess.run(command, cwd=fakes, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "found a b\n"


def test_a_linker_of_a_wheel_is_found_by_its_file(fakes, monkeypatch):
    """Not by the name of its package, which another folder may have."""
    find_linker.linker_command.cache_clear()
    monkeypatch.setenv("PATH", str(fakes))
    monkeypatch.chdir(fakes)
    command = find_linker.linker_command(False)
    find_linker.linker_command.cache_clear()
    assert os.path.isabs(command[0])
    assert "ld.lld" in command
    ready = subprocess.run([*command[:2], "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert "LLD" in ready.stdout
    assert (
        link.link_shared_library([link.function_table_object([], TARGETS["cpu:aarch64"])], TARGETS["cpu:aarch64"])[:4]
        == b"\x7fELF"
    )
