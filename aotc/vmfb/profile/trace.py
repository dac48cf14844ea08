"""Trace of a call, one dispatch at a time: the inputs and outputs of each dispatch in a file of its own.

The host program runs as usual. Its command buffers are walked here, and each command is run by the executor on its own,
in the order of the buffer. Shapes and dtypes of a kernel's arrays come from its text, which is part of a bundle's debug
information.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from aotc.vmfb.abi import COPY, Case, Command, Control, Graph, Node, Place, TileEdge, WhileNode, operand_value
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import CallError

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.debug_texts import DebugText


class Parameter(NamedTuple):
    """An array parameter of a kernel: name, dtype and an expression for each dim.

    ``output`` if the kernel writes it.
    """

    name: str
    dtype: str
    dims: tuple[ast.expr, ...]
    output: bool


class KernelText(NamedTuple):
    """The header of a kernel's text: its array parameters in order, and the names of its dims."""

    parameters: tuple[Parameter, ...]
    dims: tuple[str, ...]

    @property
    def updated(self) -> int:
        """Return the number of outputs that are updated in place. They are the first outputs, and are inputs too."""
        reads = [p for p in self.parameters if not p.output]
        return int(reads[0].name.removeprefix("a")) if reads else 0


@cache
def read_kernel_header(text: str) -> KernelText:
    """Parse the header of a kernel's text: arrays and dims."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    rows = [(a, False) for a in arguments.posonlyargs] + [(a, True) for a in arguments.args]
    parameters = []
    for argument, output in rows:
        dtype, _, dims = _parameter_annotation(argument).partition("[")
        shape = ast.parse(f"({dims.removesuffix(']')},)" if dims != "]" else "()", mode="eval").body
        assert isinstance(shape, ast.Tuple)
        parameters.append(Parameter(argument.arg, dtype, tuple(shape.elts), output))
    names = tuple(a.arg for a in arguments.kwonlyargs if _parameter_annotation(a).startswith("dim"))
    return KernelText(tuple(parameters), names)


def _parameter_annotation(argument: ast.arg) -> str:
    return str(argument.annotation.value) if isinstance(argument.annotation, ast.Constant) else ""


_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
}  # fmt: skip


def evaluate_dim(node: ast.expr, dims: Mapping[str, int]) -> int:
    """Evaluate the expression ``node`` of an array's dim for the sizes ``dims`` of the kernel's dims."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return dims[name]
        case ast.UnaryOp(op=ast.USub(), operand=x):
            return -evaluate_dim(x, dims)
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](evaluate_dim(left, dims), evaluate_dim(right, dims))
        case ast.Call(func=ast.Name(id=name), args=args):
            return {"max": max, "min": min}[name](evaluate_dim(x, dims) for x in args)
    raise ValueError(f"{ast.unparse(node)} is not a dim")


def declared_flops(text: str, sizes: Mapping[str, int]) -> int:
    """Return the operations that the header of a kernel's text declares for ``sizes``; 0 if it declares none."""
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    declared = {a.arg: a.annotation.value for a in function.args.kwonlyargs if isinstance(a.annotation, ast.Constant)}
    try:
        return evaluate_dim(ast.parse(str(declared.get("flops", 0)), mode="eval").body, sizes)
    except (ValueError, SyntaxError):
        return 0


class StepMemory(Protocol):
    """Interface of the memory of a call that is run command by command."""

    def read(self, slot: int, address: int, size: int) -> bytes:
        """Read ``size`` bytes at an address in a slot."""

    def write(self, slot: int, address: int, data: bytes) -> None:
        """Write bytes at an address in a slot."""

    def devices_of(self, slot: int) -> tuple[str, ...]:
        """Return the kind of the device whose kernels use a slot.

        Also the device's name if it has memory of its own.
        """


class StepExecutable(Protocol):
    """Interface of an executable whose commands can be run one at a time."""

    @property
    def has_callbacks(self) -> bool:
        """Return True if commands call Python functions."""

    def kernel_texts(self) -> list[DebugText] | None:
        """Return the debug information of each kernel, or None if the bundle has none."""

    def command_locs(self, number: int) -> dict[int, str]:
        """Return the locations of the commands of buffer ``number`` that differ from their kernel's own."""

    def nodes(self, number: int) -> list[Node]:
        """Return the decoded nodes of command buffer ``number``."""

    def call_of_command(
        self, command: Command, slots: PointerTable, parameters: Sequence[int], scratch: c_void_p, times: int = 1
    ) -> Callable[[], None]:
        """Return a function that runs one command ``times`` times and waits for it."""

    def origin(self) -> dict[str, str]:
        """Return the compiler version and program digest of the bundle; the bundle must have debug information."""

    def stats(self) -> dict[str, Any]:
        """Return counters and facts to show to users."""


class StepRunner(Protocol):
    """Interface of an object that runs the command buffers of a call command by command."""

    def submit(self, number: int, parameters: Sequence[int]) -> None:
        """Run command buffer ``number`` with these parameters, one command at a time."""


class Stepper:
    """Base class of instruments that run the command buffers of a call command by command.

    The method ``_dispatch`` of a subclass runs the commands of kernels.

    Parameters
    ----------
    executable : StepExecutable
    slots : PointerTable
        The pointer table of the call.
    scratch : ctypes.c_void_p
    memory : StepMemory
        Accesses the memory of the slots.
    where : str
        The function's name, for messages.

    Raises
    ------
    CallError
        If the bundle has no kernel texts.
    """

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory, where: str
    ) -> None:
        self.executable, self.slots, self.scratch, self.where = executable, slots, scratch, where
        self.memory = memory
        found = executable.kernel_texts()
        if found is None:
            raise CallError(where, "the bundle contains no kernel text", hint="compile it with debug information")
        self.kernels: list[DebugText] = found
        self.parameters: list[int] = []
        self._locs: dict[int, str] = {}
        self.graph: Graph  # the graph of the current command

    def submit(self, number: int, parameters: Sequence[int]) -> None:
        """Run command buffer ``number`` with these parameters, one command at a time."""
        self.parameters = list(parameters)
        self._locs = self.executable.command_locs(number)
        self._run(self.executable.nodes(number))

    def _run(self, nodes: Sequence[Node]) -> None:
        """Run nodes in order: each command of a graph, loops and branches as their conditions say."""
        for node in nodes:
            match node:
                case Graph():
                    for command in node.commands:
                        if isinstance(command, Control):
                            self._run(command.nodes)
                        else:
                            self.graph = node
                            self._command(command)
                case WhileNode():
                    self._run(node.condition)
                    while self._bytes(node.place, 1)[0]:
                        self._run(node.body)
                        self._run(node.condition)
                case Case():
                    index = int(np.frombuffer(self._bytes(node.place, 4), "<i4")[0])
                    self._run(node.branches[index if 0 <= index < len(node.branches) else -1])

    def location_of(self, command: Command) -> str:
        """Return the source location of a dispatch of the current buffer."""
        return self._locs.get(command.at, self.kernels[command.kernel].loc)

    def _address(self, place: Place) -> int:
        slot, offset = place
        return self.slots[slot] + operand_value(offset, self.parameters)

    def _bytes(self, place: Place, size: int) -> bytes:
        return self.memory.read(place[0], self._address(place), size) if size else b""

    def read_array(self, place: Place, p: Parameter, dims: Mapping[str, int]) -> np.ndarray:
        """Return a copy of a kernel's array at ``place``, for these sizes of its dims."""
        shape = [evaluate_dim(d, dims) for d in p.dims]
        element = to_numpy(p.dtype)
        return np.frombuffer(self._bytes(place, int(np.prod(shape)) * element.itemsize), element).reshape(shape)

    def read_raw_array(self, place: Place, p: Parameter, dims: Mapping[str, int]) -> np.ndarray:
        """Return a copy of a kernel's array; a dtype unknown to NumPy becomes an unsigned integer of the same bits."""
        found = self.read_array(place, p, dims)
        builtin = found.dtype.kind in "biufc" and found.dtype.isbuiltin
        return found if builtin else found.view(f"u{found.dtype.itemsize}")

    def _command(self, command: Command) -> None:
        run = self.executable.call_of_command(command, self.slots, self.parameters, self.scratch)
        if command.kind == COPY:
            run()
        else:
            self._dispatch(command, run)

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        raise NotImplementedError


class Tracer(Stepper):
    """Stepper that writes inputs and outputs of each dispatch to a file ``NUMBER_KERNEL.npz``.

    A dispatch may wait for tiles of other dispatches in a normal call. Its file then contains ``tiles``: for each
    dependence the number of the producer's file, the ratio of producer items to own items, and the halo.

    Parameters
    ----------
    executable, slots, scratch, memory, where
        As in :class:`Stepper`.
    folder : path
        Created if it does not exist.
    """

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory,
        where: str, folder: str | Path,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            raise CallError(where, f"cannot write the trace: {error}", folder, "a folder") from error
        super().__init__(executable, slots, scratch, memory, where)
        self.count = 0
        self.files: dict[int, int] = {}  # number of each command's last file, by the command's id

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        """Run one kernel and write its file."""
        name, text, *_ = self.kernels[command.kernel]
        loc = self.location_of(command)
        header = read_kernel_header(text)
        sizes = [operand_value(word, self.parameters) for word in command.dims]
        known = dict(zip(header.dims, sizes, strict=True))
        rows = list(zip(command.places, header.parameters, strict=True))
        outputs = [(place, p) for place, p in rows if p.output]
        reads = [(place, p) for place, p in rows if not p.output]
        changed = outputs[: header.updated]
        reads = [(place, p._replace(name=f"a{n}")) for n, (place, p) in enumerate(changed)] + reads
        arrays = {p.name: self.read_raw_array(place, p, known) for place, p in reads}
        run()
        arrays |= {p.name: self.read_raw_array(place, p, known) for place, p in outputs}
        if command.tiles:
            arrays["tiles"] = np.array([self._tile_row(t) for t in command.tiles], np.int64)
        self.files[id(command)] = self.count
        dtypes = np.array([f"{p.name}={p.dtype}" for _, p in [*reads, *outputs]])
        path = self.folder / f"{self.count:05}_{name}.npz"
        try:
            np.savez(path, allow_pickle=False, loc=np.array(loc), kernel=np.array(name), dtypes=dtypes, **arrays)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CallError(self.where, f"cannot write the trace: {error.strerror or error}", path) from error
        self.count += 1

    def _tile_row(self, t: TileEdge) -> tuple[int, int, int, int]:
        """Return a tile dependence for the file: number of the producer's file, ratio (two integers), and halo."""
        producer = self.graph.commands[t.producer]
        return self.files[id(producer)], t.times, t.over, t.halo
