"""The instruction set of the host program: one table for all tools.

An instruction is a decorated function. Its annotations after ``vm`` are the kinds of its operands, its docstring is its
documentation, and its body is its semantics. Encoder, verifier, assembler, disassembler, interpreter and
``docs/bytecode.md`` (``python -m aotc.vmfb.assembly > docs/bytecode.md``) all read :data:`ISA`.

Opcodes are never reused. A changed meaning requires a new opcode, a changed operand list a new format version.

The annotations must be objects, so this module does not postpone them.
"""

from collections.abc import Callable
from typing import Any, Protocol

from aotc.vmfb.errors import ArgumentValueError, CallError

# ---------------------------------------------------------------- operand kinds


class Out(int):
    """a register that is written"""

    prefix = "r"


class In(int):
    """a register that is read"""

    prefix = "r"


class Imm(int):
    """a 64-bit integer"""

    prefix = ""


class Arg(int):
    """an argument's number"""

    prefix = "arg"


class Axis(int):
    """a dimension of the argument before it"""

    prefix = "axis"


class Res(int):
    """a result's number"""

    prefix = "res"


class Slot(int):
    """a slot of the pointer table: arguments, results, arena, constants"""

    prefix = "slot"


class Cb(int):
    """a command buffer's number"""

    prefix = "cb"


class Target(int):
    """an instruction's number"""

    prefix = "@"


class Text(str):
    """a message; {0}, {1}... stand for the registers that follow, {0:f32} for the float of those bits"""

    prefix = '"'


class Dt(str):
    """a dtype's name"""

    prefix = "%"


class Mem(int):
    """a memory space's number"""

    prefix = "space"


class Ins(list):
    """a list of registers that are read"""

    prefix = "["


KINDS: tuple[type, ...] = (Out, In, Imm, Arg, Axis, Res, Slot, Cb, Target, Text, Dt, Mem, Ins)


class Session(Protocol):
    """Operations that instructions request: of a device during a call, or of a recorder, which cannot read memory."""

    def allocate_result(self, index: int, dims: tuple[int, ...]) -> None: ...
    def share_argument_memory(self, index: int, argument: int) -> None: ...
    def allocate_arena(self, size: int, space: int = 0) -> None: ...
    def submit(self, number: int, parameters: list[int]) -> None: ...
    def load_scalar(self, slot: int, offset: int, dtype: str) -> Any: ...
    def check_assertion(self, condition: Any, message: str, values: list[Any]) -> None: ...
    def open_debug_block(self, slot: int, offset: int, size: int) -> None: ...


class Frame:
    """The state of one execution of a host program.

    Attributes
    ----------
    registers : list of int
    dims : list of tuple of int
        The dimensions of each argument.
    session : Session
    where : str
        The function's name, for messages.
    names : tuple of str
        The arguments' names, for messages.
    """

    __slots__ = ("dims", "names", "registers", "session", "where")

    def __init__(
        self, count: int, dims: list[tuple[int, ...]], session: Session, where: str, names: tuple[str, ...]
    ) -> None:
        self.registers = [0] * count
        self.dims = dims
        self.session = session
        self.where = where
        self.names = names


class Instruction:
    """Opcode, name, operand kinds and semantics of one instruction.

    A plain class, for fast start-up (:class:`aotc.vmfb.abi.Record`).
    """

    __slots__ = ("kinds", "name", "names", "opcode", "run")

    def __init__(self, opcode: int, name: str, operands: dict[str, type], run: Callable[..., int | None]) -> None:
        self.opcode = opcode
        self.name = name
        self.kinds = tuple(operands.values())
        self.names = tuple(operands)
        self.run = run


ISA: dict[int, Instruction] = {}
BY_NAME: dict[str, Instruction] = {}
END = -1  # the next instruction after `return`


def instruction(opcode: int) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Return a decorator that adds a function to :data:`ISA` as the instruction with this opcode.

    The annotations after ``vm`` are the kinds of the operands.
    """

    def add_row(run: Callable[..., int | None]) -> Callable[..., int | None]:
        """Add ``run`` to :data:`ISA` and :data:`BY_NAME`, and return it."""
        operands = {k: v for k, v in run.__annotations__.items() if k not in ("vm", "return")}
        name = run.__name__.rstrip("_")
        if opcode in ISA or name in BY_NAME:
            raise ValueError(f"instruction {opcode:#04x} {name} is there twice")
        ISA[opcode] = BY_NAME[name] = Instruction(opcode, name, operands, run)
        return run

    return add_row


# ---------------------------------------------------------------- integers


@instruction(0x01)
def const(vm: Frame, out: Out, value: Imm) -> None:
    """out = value"""
    vm.registers[out] = value


@instruction(0x02)
def dim(vm: Frame, out: Out, argument: Arg, axis: Axis) -> None:
    """out = the size of a dimension of an argument"""
    vm.registers[out] = vm.dims[argument][axis]


@instruction(0x03)
def add(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = a + b"""
    vm.registers[out] = _word_of_register(vm, vm.registers[a] + vm.registers[b])


@instruction(0x04)
def sub(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = a - b"""
    vm.registers[out] = _word_of_register(vm, vm.registers[a] - vm.registers[b])


@instruction(0x05)
def mul(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = a * b"""
    vm.registers[out] = _word_of_register(vm, vm.registers[a] * vm.registers[b])


@instruction(0x06)
def floordiv(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = a / b, rounded down; fails if b is 0"""
    vm.registers[out] = _word_of_register(vm, vm.registers[a] // _nonzero_divisor(vm, b))


@instruction(0x07)
def mod(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = a - b * (a / b rounded down); fails if b is 0"""
    vm.registers[out] = vm.registers[a] % _nonzero_divisor(vm, b)


@instruction(0x08)
def max_(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = the larger of a and b"""
    vm.registers[out] = max(vm.registers[a], vm.registers[b])


@instruction(0x09)
def min_(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = the smaller of a and b"""
    vm.registers[out] = min(vm.registers[a], vm.registers[b])


@instruction(0x0A)
def eq(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 1 if a == b, else 0"""
    vm.registers[out] = int(vm.registers[a] == vm.registers[b])


@instruction(0x0B)
def ne(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 1 if a != b, else 0"""
    vm.registers[out] = int(vm.registers[a] != vm.registers[b])


@instruction(0x0C)
def lt(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 1 if a < b, else 0"""
    vm.registers[out] = int(vm.registers[a] < vm.registers[b])


@instruction(0x0D)
def le(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 1 if a <= b, else 0"""
    vm.registers[out] = int(vm.registers[a] <= vm.registers[b])


@instruction(0x0E)
def and_(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 1 if neither a nor b is 0, else 0"""
    vm.registers[out] = int(vm.registers[a] != 0 and vm.registers[b] != 0)


@instruction(0x0F)
def or_(vm: Frame, out: Out, a: In, b: In) -> None:
    """out = 0 if a and b are 0, else 1"""
    vm.registers[out] = int(vm.registers[a] != 0 or vm.registers[b] != 0)


@instruction(0x10)
def not_(vm: Frame, out: Out, a: In) -> None:
    """out = 1 if a is 0, else 0"""
    vm.registers[out] = int(vm.registers[a] == 0)


# ---------------------------------------------------------------- checks


@instruction(0x20)
def assert_true(vm: Frame, condition: In, message: Text, values: Ins) -> None:
    """fail with the message if the condition is 0; the message's fields are the values"""
    holds, found = vm.registers[condition], [vm.registers[register] for register in values]
    if type(holds) is not int:
        vm.session.check_assertion(holds, message, found)
    elif not holds:
        from aotc.vmfb.messages import render_message  # only for a failure

        raise CallError(vm.where, render_message(message, found))


@instruction(0x21)
def check_dim(vm: Frame, argument: Arg, axis: Axis, expected: In) -> None:
    """fail unless a dimension of an argument is the register's value"""
    dims = vm.dims[argument]
    if dims[axis] != vm.registers[expected]:
        raise ArgumentValueError(
            vm.where,
            f"argument {argument} ({vm.names[argument]}) has the wrong size in dimension {axis}",
            f"{dims[axis]}, in shape ({', '.join(map(str, dims))})",
            vm.registers[expected],
        )


# ---------------------------------------------------------------- memory and work


@instruction(0x30)
def arena(vm: Frame, size: In) -> None:
    """allocate an arena of this many bytes for the call; a second one starts with the content of the first"""
    vm.session.allocate_arena(vm.registers[size])


@instruction(0x36)
def arena_in(vm: Frame, space: Mem, size: In) -> None:
    """allocate an arena of this many bytes in a memory space other than the first"""
    vm.session.allocate_arena(vm.registers[size], space)


@instruction(0x31)
def result(vm: Frame, index: Res, dims: Ins) -> None:
    """allocate a result; its dtype is the signature's"""
    vm.session.allocate_result(index, tuple([vm.registers[r] for r in dims]))


@instruction(0x35)
def take(vm: Frame, index: Res, argument: Arg) -> None:
    """make a result share the memory of a donated argument of the same dtype and shape"""
    vm.session.share_argument_memory(index, argument)


@instruction(0x32)
def submit(vm: Frame, buffer: Cb, parameters: Ins) -> None:
    """run a command buffer with these parameters, and wait for it"""
    vm.session.submit(buffer, [vm.registers[r] for r in parameters])


@instruction(0x33)
def load_scalar(vm: Frame, out: Out, slot: Slot, offset: In, dtype: Dt) -> None:
    """out = the integer at a byte offset of a slot, after all work submitted before"""
    vm.registers[out] = vm.session.load_scalar(slot, vm.registers[offset], dtype)


@instruction(0x34)
def block(vm: Frame, slot: Slot, offset: In, size: In) -> None:
    """for debugging: an array occupies this many bytes at an offset of a slot; accesses next to it fault"""
    vm.session.open_debug_block(slot, vm.registers[offset], vm.registers[size])


# ---------------------------------------------------------------- control


@instruction(0x40)
def branch(vm: Frame, target: Target) -> int:
    """continue at another instruction"""
    return target


@instruction(0x41)
def branch_if(vm: Frame, condition: In, target: Target) -> int | None:
    """continue at another instruction unless the condition is 0"""
    return target if vm.registers[condition] else None


@instruction(0x42)
def return_(vm: Frame) -> int:
    """end the call"""
    return END


def _word_of_register(vm: Frame, value: int) -> int:
    if not -(1 << 63) <= value < 1 << 63:
        raise CallError(vm.where, "the shape arithmetic of this function leaves 64 bits for these arguments")
    return value


def _nonzero_divisor(vm: Frame, register: int) -> int:
    value = vm.registers[register]
    if value == 0:
        raise CallError(vm.where, "the shape arithmetic of this function divides by 0 for these arguments")
    return value


def encode_instruction(name: str, *operands: Any) -> list[Any]:
    """Encode an instruction as a bundle stores it: a list of opcode and operands.

    Raises
    ------
    KeyError
        If there is no instruction ``name``.
    ValueError
        If the number of operands is wrong.
    """
    row = BY_NAME[name]
    if len(operands) != len(row.kinds):
        raise ValueError(f"{name} has {len(row.kinds)} operands ({', '.join(row.names)}), not {len(operands)}")
    return [row.opcode, *operands]
