"""The executor's LLVM IR that is kept in a file: of these sources, and done without where it does not fit."""

import lzma
import subprocess
import sys

import pytest

from aotc.kernels import back_end, limits
from aotc.kernels.cpu.executor import compile as compile_executor
from aotc.kernels.cpu.executor import prebuilt_ir as executor_ir
from aotc.kernels.cpu.executor.scheduler import EXPORTS
from aotc.targets import TARGETS, host_target
from aotc.vmfb import abi

pytestmark = pytest.mark.cpu

SCRIPT = """
from aotc.kernels import numba_aot
from aotc.kernels.cpu.executor.compile import compile_executor
from aotc.targets import host_target
print(compile_executor(host_target())[:4] == b"\\x7fELF", numba_aot._numba_context.cache_info().currsize)
"""


def test_the_file_is_of_these_sources():
    library = executor_ir.read_prebuilt()
    assert library is not None, "the executor's Python was changed: make executor"
    assert library.exports() == set(EXPORTS)


def test_the_executor_is_compiled_without_numbas_front_end():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0"]


@pytest.mark.parametrize("name", ["cpu:x86-64-v3", "cpu:aarch64"])
def test_one_file_serves_all_machines(name, monkeypatch):
    monkeypatch.setattr(compile_executor, "compile_executor_by_numba", lambda: pytest.fail("Numba is asked"))
    machine = {"cpu:x86-64-v3": 62, "cpu:aarch64": 183}[name]
    assert compile_executor.compile_executor(TARGETS[name])[18:20] == machine.to_bytes(2, "little")


@pytest.mark.parametrize("change", ["limit", "word", "source", "damage", "text", "gone"])
def test_a_file_of_something_else_is_not_used(change, tmp_path, monkeypatch):
    kept = lzma.decompress(executor_ir.KEPT.read_bytes())
    other = tmp_path / "executor.ll.xz"
    if change == "limit":
        monkeypatch.setattr(limits, "IDLE_TURNS", limits.IDLE_TURNS + 1)
    elif change == "word":
        monkeypatch.setattr(abi, "POOL_ALIVE", abi.POOL_ALIVE + 8)
    elif change == "source":
        other.write_bytes(lzma.compress(b"; x" + kept[3:]))  # no digit of a digest
    elif change == "damage":
        other.write_bytes(executor_ir.KEPT.read_bytes()[:-50])
    elif change == "text":  # as an LLVM that does not know all words reads it
        other.write_bytes(lzma.compress(kept.replace(b"define i64", b"define later i64")))
    if change not in ("limit", "word"):
        monkeypatch.setattr(executor_ir, "KEPT", other)
    assert executor_ir.read_prebuilt() is None


@pytest.mark.own_process
def test_without_prebuilt_ir_numba_compiles_the_same_exports(monkeypatch):
    monkeypatch.setattr(compile_executor, "read_prebuilt", lambda: None)
    compiled, compile_by_numba, exports = [], executor_ir.compile_executor_by_numba, []
    monkeypatch.setattr(
        compile_executor, "compile_executor_by_numba", lambda: compiled.append(compile_by_numba()) or compiled[0]
    )
    monkeypatch.setattr(back_end.Library, "emit_native_object", lambda library: exports.append(library.exports()))
    compile_executor.compile_executor(host_target())
    assert len(compiled) == 1
    assert exports == [set(EXPORTS)]
