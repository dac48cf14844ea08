"""Link object files to a shared library, by a linker of the system or of a Python package."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from aotc.diagnostics import InternalError
from aotc.kernels.back_end import emit_data
from aotc.kernels.cpu.find_linker import linker_of_target
from aotc.targets import Target
from aotc.vmfb.abi import IMPORT_PREFIX, INTERFACE_BYTES, INTERFACE_SYMBOL, TABLE_SYMBOL
from aotc.vmfb.host.files import temporary_folder, temporary_path

ALLOWED_SYMBOLS = frozenset(
    ["memset", "memcpy", "memmove", "malloc", "free", "syscall", "sched_yield", "clock_gettime"]
)
THREAD_SYMBOLS = frozenset(["pthread_create", "pthread_detach", "pthread_sigmask"])

_OBJECTS, _LIBRARY = "objects", "out.so"
"""Name of a linker script that lists the objects, and name of the output. The linker opens the script when it would
open an object."""

_SPECIAL = re.compile(r"[^\w.$-]", re.ASCII)
"""Characters that LLVM's assembly escapes in a name."""

_WAITING: set[subprocess.Popen[bytes]] = set()
"""The linkers of this process that wait for their objects."""


def function_table_object(
    names: Sequence[str],
    target: Target,
    imports: Sequence[str] = (),
    own: Collection[str] = (),
    interface: bytes = bytes(INTERFACE_BYTES),
) -> bytes:
    """Return an object file with the table of kernel addresses, the interface and the import pointers of ``vmfb.abi``.

    Import pointers of functions in ``own``, which the library itself defines, are initialized; the loader fills in the
    others.
    """
    rows = ", ".join([f"ptr {_symbol_reference(name)}" for name in names])
    filled = [name for name in imports if name in own]
    lines = [f'target triple = "{target.triple}"']
    lines += [f"declare void {_symbol_reference(name)}()" for name in dict.fromkeys([*names, *filled])]
    lines.append(f"{_symbol_reference(TABLE_SYMBOL)} = constant [{len(names)} x ptr] [{rows}]")
    lines.append(
        f'{_symbol_reference(INTERFACE_SYMBOL)} = constant [{len(interface)} x i8] '
        f'c"{_bytes_as_llvm_string(interface)}"'
    )
    for name in imports:
        value = _symbol_reference(name) if name in filled else "null"
        lines.append(f"{_symbol_reference(IMPORT_PREFIX + name)} = global ptr {value}")
    return emit_data("\n".join(lines), target)


def _symbol_reference(name: str) -> str:
    """Quote a symbol name for LLVM's assembly."""
    plain = _SPECIAL.sub(lambda found: _bytes_as_llvm_string(found[0].encode()), name)
    return f'@"{plain}"'


def _bytes_as_llvm_string(data: bytes) -> str:
    """Escape bytes for a string in LLVM's assembly."""
    return "".join([f"\\{byte:02x}" for byte in data])


class Linker:
    """A linker process that starts before its object files exist, because starting a process takes milliseconds.

    Use it as a context manager, which stops the process at the end. :meth:`send_objects` creates the object files; the
    context manager removes them.

    Parameters
    ----------
    target : Target
        The target of the library.

    Raises
    ------
    CompileError
        If no linker is installed.
    """

    def __init__(self, target: Target) -> None:
        self._command = linker_of_target(target)
        self._folder = temporary_path()
        self._words = ["-o", os.path.join(self._folder, _LIBRARY), f"-L{self._folder}", f"-l:{_OBJECTS}"]
        self._process: subprocess.Popen[bytes] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Linker:
        return self

    def start(self) -> subprocess.Popen[bytes]:
        """Start the linker if it is not running, and return its process."""
        if self._process is not None:
            return self._process
        self._process = subprocess.Popen(
            [*self._command, _version_script_option(self._command), *self._words], cwd="/", bufsize=0,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C goes to this process, which ends the linker
        )  # fmt: skip
        _WAITING.add(self._process)
        return self._process

    def send_objects(self, objects: Sequence[bytes]) -> None:
        """Write the object files, and let the waiting linker process read them."""
        folder = self._stack.enter_context(temporary_folder(self._folder))
        files = [folder / f"{n}.o" for n in range(len(objects))]
        for file, data in zip(files, objects, strict=True):
            file.write_bytes(data)
        named = " ".join(f'"{file}"' for file in files)
        (folder / _OBJECTS).write_text(f"INPUT({named})")
        process = self.start()
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # a linker that has ended is restarted
            pipe.write(b"{ };\n")

    def linked_library(self, allowed: Collection[str] = ()) -> bytes:
        """Wait for the linker; return the bytes of the shared library, which may import the ``allowed`` symbols.

        Raises
        ------
        InternalError
            If linking fails, or if the library imports a symbol that a bundle does not provide.
        """
        if self._process is None or self._process.wait():
            self._link_without_pipe()
        data = Path(self._folder, _LIBRARY).read_bytes()
        missing = sorted(undefined_symbols(data) - ALLOWED_SYMBOLS - THREAD_SYMBOLS - set(allowed))
        if missing:
            raise InternalError(f"kernels refer to unknown symbols: {', '.join(missing)}")
        return data

    def _link_without_pipe(self) -> None:
        """Run the linker again on existing objects: gold does not read pipes, and some systems have no /dev/stdin."""
        command = [*self._command, *self._words]
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            raise InternalError(f"{Path(command[0]).name} failed: {done.stderr.strip()[:2000]}")

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            _WAITING.discard(self._process)
            with self._process as process:
                process.kill()
        self._stack.close()


def _version_script_option(command: Sequence[str]) -> str:
    """Return the option that makes a linker wait: before it opens objects, it reads a version script from a pipe."""
    handed_on = "-Wl," if "-nostdlib" in command else ""
    return f"{handed_on}--version-script=/dev/stdin"


def _close_inherited_pipes() -> None:
    """Close, in a forked child, the pipes of its parent's linkers, which wait for the end of the pipe."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for process in _WAITING:
        if process.stdin is not None and not process.stdin.closed:
            os.dup2(nothing, process.stdin.fileno(), inheritable=False)
    os.close(nothing)
    _WAITING.clear()


os.register_at_fork(after_in_child=_close_inherited_pipes)


def link_shared_library(objects: Sequence[bytes], target: Target, allowed: Collection[str] = ()) -> bytes:
    """Link object files to a shared library that may import the ``allowed`` symbols; return its bytes."""
    with Linker(target) as started:
        started.send_objects(objects)
        return started.linked_library(allowed)


def undefined_symbols(library: bytes) -> set[str]:
    """Return the names of the undefined symbols of a 64-bit little-endian ELF library."""
    sections_at, = struct.unpack_from("<Q", library, 0x28)
    size, count = struct.unpack_from("<HH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, sections_at + n * size) for n in range(count)]
    found: set[str] = set()
    for _, kind, _, _, offset, length, linked, _, _, entry in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        strings = sections[linked][4]
        for at in range(offset + entry, offset + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", library, at)
            if section == 0:
                end = library.index(b"\0", strings + name)
                found.add(library[strings + name : end].decode())
    return found
