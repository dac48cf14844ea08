"""Another CPU architecture as a device of the runtime: each submission is a run of ``runner.c`` under qemu.

The host program runs here, in Python; the memory of a submission passes through a file. Guard bytes surround each
array, and are checked afterwards. The module has the functions of :class:`aotc.vmfb.interfaces.Device`.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np

from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.kernels.cpu.compile import compile_kernel
from aotc.kernels.cpu.executor.compile import compile_executor
from aotc.kernels.cpu.link import function_table_object, link_shared_library
from aotc.targets import Target
from aotc.vmfb.abi import ALIGNMENT, DISPATCH, Command, Graph, Slots, constant_operand
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.commands import decode_commands, encode_commands, kernel_words
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.plan import Plan, check_assertions
from aotc.vmfb.verify.buffers import Buffers, load_command_buffers
from aotc.vmfb.weights.constants import load_constants

MACHINES = {
    "cpu:aarch64": ("aarch64", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
    "cpu:aarch64-dotprod": ("aarch64", ("qemu-aarch64", "-cpu", "neoverse-n1", "-L", "/usr/aarch64-linux-gnu")),
    "cpu:aarch64-bf16": ("aarch64", ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")),
    "cpu:aarch64-sve256": ("aarch64", ("qemu-aarch64", "-cpu", "max,sve-max-vq=2", "-L", "/usr/aarch64-linux-gnu")),
    "cpu:aarch64-sve512": ("aarch64", ("qemu-aarch64", "-cpu", "a64fx", "-L", "/usr/aarch64-linux-gnu")),
    "cpu:x86-64-v2": ("x86_64", ("qemu-x86_64", "-cpu", "Nehalem")),
    "cpu:x86-64-v3": ("x86_64", ("qemu-x86_64", "-cpu", "Haswell")),
}
"""By target: zig's name of the architecture, and the command that runs a program for it."""
INSTALL = "apt install qemu-user libc6-arm64-cross"
ROOT = Path("/usr/aarch64-linux-gnu/lib")
THREADS = 2
WALL = np.full(ALIGNMENT, 0x5A, np.uint8)


def missing(target: str) -> str:
    """Return the command that installs packages for ``target`` that this machine lacks, or an empty string."""
    architecture, (program, *_) = MACHINES[target]
    native = architecture == platform.machine()
    return "" if shutil.which(program) and (native or ROOT.is_dir()) else INSTALL


@cache
def workplace() -> TemporaryDirectory[str]:
    """Return the temporary folder of this process, which is deleted at its end."""
    return TemporaryDirectory(prefix="aotc-aarch64-")


@cache
def runner(architecture: str) -> str:
    """Compile ``runner.c``, once in a process, and return its path."""
    path = Path(workplace().name, f"runner-{architecture}")
    source = Path(__file__).with_name("runner.c")
    kind = f"{architecture}-linux-gnu"
    command = [sys.executable, "-m", "ziglang", "cc", "-target", kind, "-O1", "-o", path, source, "-ldl"]
    subprocess.run(command, check=True, timeout=300)
    return str(path)


def obstacle(variant: dict[str, Any]) -> str:
    """Return an empty string: all bundles of tests are for machines of the table."""
    return "" if variant["target"] in MACHINES else f"it is for none of {', '.join(MACHINES)}"


def rank(variant: dict[str, Any]) -> int:
    """Return the same rank for all variants: tests compile for one target at a time."""
    return 0


def check(bundle: OpenedBundle, variant: dict[str, Any]) -> None:
    """Verify the parts of a bundle that need no machine."""
    load_command_buffers(bundle, variant)


def open_executable(
    bundle: OpenedBundle, variant: dict[str, Any], threads: int | None, ordinal: int, custom_calls: Mapping[str, Any]
) -> EmulatedExecutable:
    """Write the libraries of a variant to files for the runner."""
    functions = [*variant.get("imports", {}).get("lapack", []), *variant.get("custom_calls", [])]
    if functions:
        raise BundleError(bundle.where, "nobody fills in the functions of other libraries", functions)
    held = load_constants(bundle, variant.get("constants"))
    constants = np.frombuffer(ctypes.string_at(held.address, held.size), np.uint8)
    segments = [variant[name] for name in ("executor", "library")]
    libraries = _written([b"" if n is None else bytes(bundle.verified_segment(n)) for n in segments])
    states = [row["states"] for row in variant["command_buffers"]]
    scratch = max((kernel["scratch"] for kernel in variant["kernels"]), default=0)
    buffers = load_command_buffers(bundle, variant)
    return EmulatedExecutable(variant["target"], libraries, buffers, states, scratch, constants, threads or THREADS)


@dataclass(frozen=True, slots=True)
class EmulatedExecutable:
    """A variant: its libraries (executor, kernels) in files, its command buffers, and their numbers of states."""

    target: str
    libraries: list[Path]
    buffers: Buffers
    states: list[int]
    scratch: int
    constants: np.ndarray
    threads: int = THREADS

    @property
    def constants_bytes(self) -> int:
        """Return the number of bytes of the constants."""
        return self.constants.nbytes

    def replay(self, plan: Plan) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
        """Return a function that runs a plan in a new session."""

        def run(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
            session = self.session(Slots(plan.arguments, len(plan.results)))
            session.allocate_arena(plan.arena)
            for slot, array in [*enumerate(arrays), *zip(plan.slots_of_results(), results)]:
                session.bind_array(slot, array)
            first, *judged = plan.assertions_by_submission()
            check_assertions(first, session.load_scalar)
            for (number, parameters), after in zip(plan.submissions, judged, strict=True):
                session.submit(number, parameters)
                check_assertions(after, session.load_scalar)

        return run

    def session(self, layout: Slots) -> EmulatedSession:
        """Begin a call with a pointer table of this layout."""
        return EmulatedSession(self, layout)

    def stats(self) -> dict[str, Any]:
        """Return facts about this executable."""
        return {"target": self.target, "threads": self.threads}

    def trim(self) -> int:
        """Return 0: nothing is cached."""
        return 0


class EmulatedSession:
    """One call: the memory of its slots, and the runs that modify it."""

    def __init__(self, executable: EmulatedExecutable, layout: Slots) -> None:
        self.executable, self.layout = executable, layout
        self.slots: list[np.ndarray] = [np.zeros(0, np.uint8)] * layout.count
        self.slots[layout.constants] = executable.constants

    def allocate_arena(self, size: int) -> None:
        """Allocate an arena: bytes of an earlier arena are preserved, new bytes are not zero."""
        found, old = np.full(size, 0xA5, np.uint8), self.slots[self.layout.arena]
        found[: old.size] = old[:size]
        self.slots[self.layout.arena] = found

    def bind_array(self, slot: int, array: np.ndarray) -> None:
        """Bind the bytes of an argument or a result to a slot."""
        memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
        self.slots[slot] = np.frombuffer(memory, np.uint8) if array.nbytes else np.zeros(0, np.uint8)

    def submit(self, number: int, parameters: Sequence[int]) -> None:
        """Run a command buffer under qemu, and verify the guard bytes."""
        buffers, states = self.executable.buffers, self.executable.states[number]
        words, nodes = buffers.words[number], buffers.nodes[number]
        patches = kernel_words(nodes)
        scratch = -(-self.executable.scratch // ALIGNMENT) * ALIGNMENT
        head = [len(words), len(patches), len(self.slots), len(parameters), states, scratch]
        count = sum(head[:4]) + len(head)
        places, size = _layout(self.slots, 8 * count)
        job = np.zeros(size, np.uint8)
        job[: 8 * count].view(np.int64)[:] = [*head, *words, *patches, *places, *parameters]
        for place, content in zip(places, self.slots):
            end = place + content.size
            job[place:end] = content
            job[place - WALL.size : place] = job[end : end + WALL.size] = WALL
        path = self.executable.libraries[0].with_name("job")
        path.write_bytes(job.tobytes())
        self._run(path)
        after = np.fromfile(path, np.uint8)
        path.unlink()
        for slot, (place, content) in enumerate(zip(places, self.slots)):
            end = place + content.size
            walls = (after[place - WALL.size : place], after[end : end + WALL.size])
            if any((wall != WALL).any() for wall in walls):
                raise CallError("", f"a kernel wrote beyond slot {slot}")
            if content.flags.writeable:
                content[:] = after[place:end]

    def _run(self, job: Path) -> None:
        architecture, emulator = MACHINES[self.executable.target]
        command = [*emulator, runner(architecture), *self.executable.libraries, job, str(self.executable.threads)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise CallError("", f"the runner ended with {done.returncode}", done.stderr.strip())

    def load_scalar(self, slot: int, offset: int, dtype: str) -> int:
        """Return the integer at a byte offset of a slot."""
        element = to_numpy(dtype)
        return int(self.slots[slot][offset : offset + element.itemsize].view(element)[0])

    def open_debug_block(self, slot: int, offset: int, size: int) -> None:
        """Do nothing: there are no guard pages."""

    def close(self) -> None:
        """Do nothing: the session owns no resources."""


def _written(libraries: Sequence[bytes]) -> list[Path]:
    """Write libraries to a new folder and return their paths."""
    folder = Path(mkdtemp(dir=workplace().name))
    paths = [folder / f"{n}.so" for n in range(len(libraries))]
    for path, data in zip(paths, libraries):
        path.write_bytes(data)
    return paths


def run_kernel(kernel: Kernel, arrays: Sequence[np.ndarray], grid: int, target: Target) -> None:
    """Run one kernel without dims on ``arrays``, outputs last, as a bundle of this kernel alone."""
    made = [compile_kernel(kernel, target), function_table_object([kernel.name], target)]
    libraries = _written([link_shared_library([compile_executor(target)], target), link_shared_library(made, target)])
    places = [(slot, constant_operand(0)) for slot in range(len(arrays))]
    command = Command(DISPATCH, 0, constant_operand(grid), constant_operand(1 + grid // 3), 0, (), places, ())
    words = np.array(encode_commands([Graph([command], state=0, serial=False)]), np.int64)
    buffers = Buffers([])
    buffers.words.append(words)
    buffers.nodes.append(decode_commands(words.tolist()))
    alone = EmulatedExecutable(target.name, libraries, buffers, [1], scratch_bytes(kernel), np.zeros(0, np.uint8))
    session = alone.session(Slots(len(arrays), 0))
    for slot, array in enumerate(arrays):
        session.bind_array(slot, array)
    session.submit(0, ())


def _layout(slots: Sequence[np.ndarray], header: int) -> tuple[list[int], int]:
    """Return the offset of each slot in a job's file, with space for guard bytes, and the size of the file."""
    places, at = [], header
    for content in slots:
        at = -(-(at + WALL.size) // ALIGNMENT) * ALIGNMENT
        places.append(at)
        at += content.size + WALL.size
    return places, at
