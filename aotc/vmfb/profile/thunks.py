"""Thunks: machine code in place of a kernel that logs start, end and thread of each call, and calls the kernel.

A thunk has the calling convention of a kernel (:mod:`aotc.vmfb.abi`). It jumps to shared code, which calls the kernel
and appends a row to the log. Executor and bundle are unchanged, and without a recording there are no thunks. The code
is listed as instructions with their encodings, which a test assembles again.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys

import numpy as np

from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.pointers import address_of

# Words of a thunk's data: kernel address, kernel number, number of dims, the log, and the byte offset of the last
# array's pointer. The last array is an output, whose address distinguishes concurrent calls.
TARGET, NUMBER, DIMS, LOG, LAST, ABOUT_WORDS = range(6)
# Words of the log: number of rows, including those that did not fit, capacity, and address of the rows.
COUNT, CAPACITY, ROWS, LOG_WORDS = range(4)
# Words of a row; the dims follow, as many as fit.
ROW_NUMBER, ROW_FIRST, ROW_LAST, ROW_BEGAN, ROW_ENDED, ROW_THREAD, ROW_PLACE, ROW_DIMS = range(8)
ROW_WORDS = 16
MOST_DIMS = ROW_WORDS - ROW_DIMS

# The thunk's data is in r10; a thread is identified by the address of its control block.
X86_64 = (
    ("push rbp", "55"), ("push rbx", "53"), ("push r12", "4154"), ("push r13", "4155"), ("push r14", "4156"),
    ("push r15", "4157"), ("sub rsp, 8", "4883ec08"), ("mov r12, r10", "4d89d4"), ("mov r13, rdx", "4989d5"),
    ("mov r14, rcx", "4989ce"), ("mov rbp, rsi", "4889f5"), ("mov r15, rdi", "4989ff"), ("rdtsc", "0f31"),
    ("shl rdx, 32", "48c1e220"),
    ("or rax, rdx", "4809d0"), ("mov rbx, rax", "4889c3"), ("mov rdx, r13", "4c89ea"), ("call [r12]", "41ff1424"),
    ("rdtsc", "0f31"), ("shl rdx, 32", "48c1e220"), ("or rax, rdx", "4809d0"), ("mov rcx, [r12 + 32]", "498b4c2420"),
    ("mov r11, [r15 + rcx]", "4d8b1c0f"), ("mov r15, rax", "4989c7"),
    ("mov r10, [r12 + 24]", "4d8b542418"), ("mov eax, 1", "b801000000"), ("lock xadd [r10], rax", "f0490fc102"),
    ("cmp rax, [r10 + 8]", "493b4208"), ("jae full", "7340"), ("shl rax, 7", "48c1e007"),
    ("add rax, [r10 + 16]", "49034210"), ("mov rdx, [r12 + 8]", "498b542408"), ("mov [rax], rdx", "488910"),
    ("mov [rax + 8], r13", "4c896808"), ("mov [rax + 16], r14", "4c897010"), ("mov [rax + 24], rbx", "48895818"),
    ("mov [rax + 32], r15", "4c897820"), ("mov rdx, fs:[0]", "64488b142500000000"),
    ("mov [rax + 40], rdx", "48895028"), ("mov rcx, [r12 + 16]", "498b4c2410"), ("lea rdi, [rax + 56]", "488d7838"),
    ("mov [rax + 48], r11", "4c895830"),
    ("mov rsi, rbp", "4889ee"), ("rep movsq", "f348a5"), ("full: add rsp, 8", "4883c408"), ("pop r15", "415f"),
    ("pop r14", "415e"), ("pop r13", "415d"), ("pop r12", "415c"), ("pop rbx", "5b"), ("pop rbp", "5d"), ("ret", "c3"),
)  # fmt: skip
X86_64_CLOCK = (("rdtsc", "0f31"), ("shl rdx, 32", "48c1e220"), ("or rax, rdx", "4809d0"), ("ret", "c3"))
X86_64_THREAD = (("mov rax, fs:[0]", "64488b042500000000"), ("ret", "c3"))

# The thunk's data is in x16.
AARCH64 = (
    ("stp x29, x30, [sp, #-64]!", "fd7bbca9"), ("stp x19, x20, [sp, #16]", "f35301a9"),
    ("stp x21, x22, [sp, #32]", "f55b02a9"), ("stp x23, x24, [sp, #48]", "f76303a9"), ("mov x29, sp", "fd030091"),
    ("mov x19, x16", "f30310aa"), ("mov x20, x2", "f40302aa"), ("mov x21, x3", "f50303aa"),
    ("mov x24, x1", "f80301aa"), ("mov x23, x0", "f70300aa"), ("mrs x22, cntvct_el0", "56e03bd5"),
    ("ldr x17, [x19]", "710240f9"),
    ("blr x17", "20023fd6"), ("mrs x14, cntvct_el0", "4ee03bd5"), ("ldr x13, [x19, #32]", "6d1240f9"),
    ("ldr x13, [x23, x13]", "ed6a6df8"), ("ldr x9, [x19, #24]", "690e40f9"),
    ("again: ldaxr x10, [x9]", "2afd5fc8"), ("add x11, x10, #1", "4b050091"), ("stlxr w12, x11, [x9]", "2bfd0cc8"),
    ("cbnz w12, again", "acffff35"), ("ldr x11, [x9, #8]", "2b0540f9"), ("cmp x10, x11", "5f010beb"),
    ("b.hs full", "02020054"), ("ldr x11, [x9, #16]", "2b0940f9"), ("add x11, x11, x10, lsl #7", "6b1d0a8b"),
    ("ldr x10, [x19, #8]", "6a0640f9"), ("stp x10, x20, [x11]", "6a5100a9"), ("stp x21, x22, [x11, #16]", "755901a9"),
    ("mrs x10, tpidr_el0", "4ad03bd5"), ("stp x14, x10, [x11, #32]", "6e2902a9"),
    ("str x13, [x11, #48]", "6d1900f9"), ("ldr x9, [x19, #16]", "690a40f9"),
    ("next: cbz x9, full", "c90000b4"), ("ldr x10, [x24], #8", "0a8740f8"), ("str x10, [x11, #56]", "6a1d00f9"),
    ("add x11, x11, #8", "6b210091"), ("sub x9, x9, #1", "290500d1"), ("b next", "fbffff17"),
    ("full: ldp x23, x24, [sp, #48]", "f76343a9"), ("ldp x21, x22, [sp, #32]", "f55b42a9"),
    ("ldp x19, x20, [sp, #16]", "f35341a9"), ("ldp x29, x30, [sp], #64", "fd7bc4a8"), ("ret", "c0035fd6"),
)  # fmt: skip
AARCH64_CLOCK = (("mrs x0, cntvct_el0", "40e03bd5"), ("ret", "c0035fd6"))
AARCH64_THREAD = (("mrs x0, tpidr_el0", "40d03bd5"), ("ret", "c0035fd6"))

_STUB = 16  # bytes of a thunk before the shared code


def _x86_64_stub(about: int, distance: int) -> bytes:
    """Encode the thunk ``mov r10, about; jmp shared``.

    ``distance`` is that of the shared code from the start of the stub.
    """
    return b"\x49\xba" + struct.pack("<Q", about) + b"\xe9" + struct.pack("<i", distance - 15) + b"\x90"


def _aarch64_stub(about: int, distance: int) -> bytes:
    """Encode the thunk ``ldr x16, about; b shared``, followed by the word ``about``."""
    return struct.pack("<II", 0x58000050, 0x14000000 | ((distance - 4) >> 2 & 0x3FFFFFF)) + struct.pack("<Q", about)


MACHINES = {
    "x86_64": (X86_64, X86_64_CLOCK, X86_64_THREAD, _x86_64_stub),
    "aarch64": (AARCH64, AARCH64_CLOCK, AARCH64_THREAD, _aarch64_stub),
}


def assemble_code(rows: tuple[tuple[str, str], ...]) -> bytes:
    """Concatenate the encodings of instructions; ``rows`` has pairs of assembly text and encoding."""
    return b"".join(bytes.fromhex(code) for _, code in rows)


class Thunks:
    """Thunks of the kernels of an executable, which write to one log.

    Parameters
    ----------
    kernels : list of (int, int, int)
        Address, number of arrays and of dims of each kernel; its index is its number in the log.
    where : str
        The module, for messages.

    Raises
    ------
    CallError
        If there is no code for this machine, or the system refuses executable memory.
    """

    def __init__(self, kernels: list[tuple[int, int, int]], where: str) -> None:
        machine = MACHINES.get(platform.machine()) if sys.platform.startswith("linux") else None
        if machine is None:
            what = f"dispatches cannot be timed on {sys.platform} {platform.machine()}"
            raise CallError(where, what, hint="module.profile(name, *arrays) runs one at a time")
        shared, clock, thread, stub = machine
        self.log = np.zeros(LOG_WORDS, np.int64)
        self._about = np.zeros((len(kernels), ABOUT_WORDS), np.int64)
        for number, (address, places, dims) in enumerate(kernels):
            last = 8 * max(places - 1, 0)
            self._about[number] = address, number, min(dims, MOST_DIMS), address_of(self.log), last
        at_shared = _STUB * len(kernels)
        first = address_of(self._about)
        stubs = [stub(first + 8 * ABOUT_WORDS * n, at_shared - _STUB * n) for n in range(len(kernels))]
        code = b"".join(stubs) + assemble_code(shared)
        at_clock, at_thread = (-(-len(code) // _STUB) * _STUB + n * _STUB for n in range(2))
        code = code.ljust(at_clock, b"\0") + assemble_code(clock).ljust(_STUB, b"\0") + assemble_code(thread)
        try:
            self._memory, base = map_executable_memory(code)
        except OSError as error:
            raise CallError(where, f"the system allows no code to be made: {error.strerror or error}") from error
        self.addresses = [base + _STUB * n for n in range(len(kernels))]
        function = ctypes.CFUNCTYPE(ctypes.c_int64)
        self.clock, self.thread = function(base + at_clock), function(base + at_thread)


def map_executable_memory(code: bytes) -> tuple[mmap.mmap, int]:
    """Copy ``code`` to executable, read-only memory; return the memory and its address.

    Raises
    ------
    OSError
        If the system refuses executable memory.
    """
    memory = mmap.mmap(-1, len(code), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE)
    memory.write(code)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = ctypes.c_size_t(-(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE)
    if protect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "mprotect refuses memory that can be executed")
    return memory, address
