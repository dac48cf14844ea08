"""The machine code of thunks and of the roof is what its instructions say; another machine gets a sentence."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from aotc.vmfb.errors import CallError
from aotc.vmfb.profile import roofline as roof
from aotc.vmfb.profile import thunks

pytestmark = pytest.mark.cpu
TRIPLES = {"x86_64": "x86_64-linux-gnu", "aarch64": "aarch64-linux-gnu"}
OBJCOPY = shutil.which("llvm-objcopy") or shutil.which("objcopy")


def assembled(text, machine, folder):
    """The bytes of a text section."""
    source, made, code = (folder / name for name in ("a.s", "a.o", "a.bin"))
    source.write_text((".intel_syntax noprefix\n" if machine == "x86_64" else "") + text)
    compiler = [sys.executable, "-m", "ziglang", "cc", "-target", TRIPLES[machine], "-c", str(source), "-o", str(made)]
    subprocess.run([*compiler, *(["-mcpu=x86_64_v4"] if machine == "x86_64" else [])], check=True)
    subprocess.run([OBJCOPY, "-O", "binary", "--only-section=.text", str(made), str(code)], check=True)
    return code.read_bytes()


def functions():
    for machine, (shared, clock, thread, _) in thunks.MACHINES.items():
        for name, rows in (("shared", shared), ("clock", clock), ("thread", thread)):
            text = "".join(f"{line}\n" for line, _ in rows)
            yield pytest.param(machine, text, thunks.assemble_code(rows), id=f"{machine}-{name}")
    for n, peak in enumerate(roof.PEAKS):
        yield pytest.param(peak.machine, peak.assembly(), bytes.fromhex(peak.code), id=f"{peak.machine}-peak{n}")


@pytest.mark.skipif(OBJCOPY is None or sys.platform != "linux", reason="needs objcopy (apt install binutils)")
@pytest.mark.parametrize(("machine", "text", "code"), list(functions()))
def test_the_bytes_are_those_of_the_instructions(machine, text, code, tmp_path):
    pytest.importorskip("ziglang")
    if machine == "aarch64" and "llvm" not in OBJCOPY:
        pytest.skip("needs llvm-objcopy (apt install llvm)")
    assert assembled(text, machine, tmp_path) == code


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_stubs_lead_to_the_shared_code(machine, tmp_path):
    pytest.importorskip("ziglang")
    if OBJCOPY is None or "llvm" not in OBJCOPY:
        pytest.skip("needs llvm-objcopy (apt install llvm)")
    stub = thunks.MACHINES[machine][3]
    about = 0x1122334455667788
    text = {
        "x86_64": "mov r10, 0x1122334455667788\njmp shared\nnop\n" * 2 + "shared:\n",
        "aarch64": "ldr x16, one\nb shared\none: .quad 0x1122334455667788\n"
        "ldr x16, two\nb shared\ntwo: .quad 0x1122334455667788\nshared:\n",
    }[machine]
    text = text.replace("jmp shared", ".byte 0xe9\n.long shared - . - 4")  # not the short form
    assert assembled(text, machine, tmp_path) == stub(about, 32) + stub(about, 16)


def test_an_unsupported_machine_is_an_error(monkeypatch):
    monkeypatch.setattr(thunks.platform, "machine", lambda: "riscv64")
    with pytest.raises(CallError, match="cannot be timed on linux riscv64"):
        thunks.Thunks([], "here")


def test_a_system_without_executable_memory_is_an_error(monkeypatch):
    def refused(*_):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(thunks, "map_executable_memory", refused)
    with pytest.raises(CallError, match="allows no code to be made: Permission denied"):
        thunks.Thunks([(0, 0, 0)], "here")


def test_the_roof_is_higher_than_what_numpy_does():
    x = np.ones((64, 64), np.float32)
    assert roof.roof_of(x.nbytes).flops > 1
    assert roof.roof_of(x.nbytes).bytes > 1
    assert roof.Roof(2.0, 4.0).nanoseconds(8, 4) == 4
    assert roof.Roof(2.0, 4.0).nanoseconds(2, 40) == 10


def test_without_a_loop_for_the_machine_numpy_tells_the_roof(monkeypatch):
    monkeypatch.setattr(roof, "PEAKS", ())
    assert roof._measured_flops.__wrapped__() > 0.1
