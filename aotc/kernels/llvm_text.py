"""Writer of llvmlite modules as LLVM assembly, several times as fast as llvmlite's own.

llvmlite names each value, ``%".12"``, and formats each operand by several calls. Here unnamed values are numbered as
LLVM numbers them, and a table has a writer for each kind of instruction. libNVVM's LLVM 7 numbers neither arguments nor
blocks, so these have names::

    %"sum" = fadd float %3, 0x3ff0000000000000
    %4 = getelementptr i8, ptr %".1", i64 64
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from llvmlite import ir
from llvmlite.ir import instructions as instr


class Distinct(ir.MDValue):
    """A distinct metadata node, which llvmlite lacks; a node with operands first refers to itself."""

    def __init__(self, module: ir.Module, operands: Iterable[ir.MDValue] = ()) -> None:
        super().__init__(module, operands, name=str(len(module.metadata)))

    def descr(self, buf: list[str]) -> None:
        """Append the text to ``buf``."""
        itself = [self] if self.operands else []
        buf.append(f"distinct !{{{', '.join(x.get_reference() for x in (*itself, *self.operands))}}}")

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__


class UniqueNameScope:
    """The explicitly named values of a function; ``scope`` makes duplicate names unique."""

    def __init__(self, scope: UniqueNameScope) -> None:
        self._scope = scope

    def register(self, name: str, deduplicate: bool = False) -> str:
        """Return the name of a new value: empty, or ``name``, made unique by a number."""
        return name and self._scope.register(name, deduplicate)


def module_text(module: ir.Module) -> str:
    """Return the assembly of ``module``, whose functions use :class:`UniqueNameScope`."""
    lines = [f'; ModuleID = "{module.name}"', f'target triple = "{module.triple}"']
    lines.append(f'target datalayout = "{module.data_layout}"')
    lines += map(global_text, module.globals.values())
    for name, node in module.namedmetadata.items():
        lines.append(f"!{name} = !{{ {', '.join(x.get_reference() for x in node.operands)} }}")
    return "\n".join([*lines, *map(str, module.metadata), ""])


def global_text(value: ir.GlobalValue) -> str:
    """Return the assembly of a global value: a function, a global variable, or a value that is already text."""
    return (
        "\n".join(_function_definition_lines(value)) if isinstance(value, ir.Function) and value.blocks else str(value)
    )


def _function_definition_lines(function: ir.Function) -> Iterator[str]:
    """Yield the lines of a function that has a body."""
    head: list[str] = []
    function.descr_prototype(head)
    yield f"{head[0].rstrip()} {{"
    refer = _Operands(function)
    for block in function.blocks:
        yield f"{refer.names[id(block)][1:]}:"
        for i in block.instructions:
            text = _WRITE[type(i)](i, refer)
            if i.metadata:
                text += "".join([f", !{kind} {node.get_reference()}" for kind, node in i.metadata.items()])
            yield f"  {name} = {text}" if (name := refer.names.get(id(i))) else f"  {text}"
    yield "}"


class _Operands:
    """Formats the operands of a function's instructions."""

    def __init__(self, function: ir.Function) -> None:
        self.names = {id(argument): argument.get_reference() for argument in function.args}
        count = 0
        for number, block in enumerate(function.blocks):
            self.names[id(block)] = block.get_reference() if block.name else f"%block{number}"
            for i in block.instructions:
                if i.name:
                    self.names[id(i)] = i.get_reference()
                elif not isinstance(i.type, ir.VoidType):
                    self.names[id(i)] = f"%{count}"
                    count += 1

    def of(self, value: ir.Value) -> str:
        """Return the text of an operand."""
        return self.names.get(id(value)) or value.get_reference()

    def typed(self, value: ir.Value) -> str:
        """Return the text of an operand with its type."""
        return f"{value.type!s} {self.names.get(id(value)) or value.get_reference()}"

    def all_typed(self, values: Iterable[ir.Value]) -> str:
        """Return the texts of operands with their types."""
        return ", ".join(map(self.typed, values))


_Write = Callable[[ir.Instruction, _Operands], str]


def _operation_name_text(i: ir.Instruction) -> str:
    return " ".join([i.opname, *i.flags]) if i.flags else i.opname


def _operation_text(i: ir.Instruction, refer: _Operands) -> str:
    return f"{_operation_name_text(i)} {i.type!s} {', '.join(map(refer.of, i.operands))}"


def _typed_operation_text(i: ir.Instruction, refer: _Operands) -> str:
    return f"{_operation_name_text(i)} {refer.all_typed(i.operands)}"


def _call_text(i: instr.CallInstr, refer: _Operands) -> str:
    kind = i.callee.function_type
    result = kind if kind.var_arg else kind.return_type
    head = " ".join([x for x in (i.tail, i.opname, *sorted(i.fastmath), i.cconv) if x])
    return f"{head} {result!s} {refer.of(i.callee)}({refer.all_typed(i.args)}) {' '.join(i.attributes)}"


def _compare_text(i: instr.CompareInstr, refer: _Operands) -> str:
    x, y = i.operands
    return f"{_operation_name_text(i)} {i.op} {refer.typed(x)}, {refer.of(y)}"


def _cast_text(i: instr.CastInstr, refer: _Operands) -> str:
    return f"{i.opname} {refer.typed(i.operands[0])} to {i.type!s}"


def _alignment_text(i: instr.LoadInstr | instr.StoreInstr | instr.AllocaInstr) -> str:
    return "" if i.align is None else f", align {i.align}"


def _load_text(i: instr.LoadInstr, refer: _Operands) -> str:
    return f"load {i.type!s}, {refer.typed(i.operands[0])}{_alignment_text(i)}"


def _store_text(i: instr.StoreInstr, refer: _Operands) -> str:
    return f"store {refer.all_typed(i.operands)}{_alignment_text(i)}"


def _atomic_load_text(i: instr.LoadAtomicInstr, refer: _Operands) -> str:
    return f"load atomic {i.type!s}, {refer.typed(i.operands[0])} {i.ordering}{_alignment_text(i)}"


def _atomic_store_text(i: instr.StoreAtomicInstr, refer: _Operands) -> str:
    return f"store atomic {refer.all_typed(i.operands)} {i.ordering}{_alignment_text(i)}"


def _atomic_modify_text(i: instr.AtomicRMW, refer: _Operands) -> str:
    return f"atomicrmw {i.operation} {refer.all_typed(i.operands)} {i.ordering}"


def _compare_exchange_text(i: instr.CmpXchg, refer: _Operands) -> str:
    return f"cmpxchg {refer.all_typed(i.operands)} {i.ordering} {i.failordering}"


def _alloca_text(i: instr.AllocaInstr, refer: _Operands) -> str:
    counted = "".join([f", {refer.typed(x)}" for x in i.operands])
    return f"alloca {i.allocated_type!s}{counted}{_alignment_text(i)}"


def _getelementptr_text(i: instr.GEPInstr, refer: _Operands) -> str:
    return f"getelementptr {'inbounds ' if i.inbounds else ''}{i.source_etype!s}, {refer.all_typed(i.operands)}"


def _phi_text(i: instr.PhiInstr, refer: _Operands) -> str:
    came = ", ".join([f"[{refer.of(value)}, {refer.of(block)}]" for value, block in i.incomings])
    return f"{_operation_name_text(i)} {i.type!s} {came}"


def _aggregate_indices_text(i: instr.ExtractValue | instr.InsertValue, refer: _Operands) -> str:
    return f"{i.opname} {refer.all_typed(i.operands)}, {', '.join(map(str, i.indices))}"


def _switch_text(i: instr.SwitchInstr, refer: _Operands) -> str:
    cases = " ".join([refer.all_typed(case) for case in i.cases])
    return f"switch {refer.all_typed((i.value, i.default))} [{cases}]"


_WRITE: dict[type[ir.Instruction], _Write] = {
    ir.Instruction: _operation_text,
    instr.AllocaInstr: _alloca_text,
    instr.AtomicRMW: _atomic_modify_text,
    instr.Branch: _typed_operation_text,
    instr.CallInstr: _call_text,
    instr.CastInstr: _cast_text,
    instr.CmpXchg: _compare_exchange_text,
    instr.ConditionalBranch: _typed_operation_text,
    instr.ExtractElement: _typed_operation_text,
    instr.ExtractValue: _aggregate_indices_text,
    instr.FCMPInstr: _compare_text,
    instr.GEPInstr: _getelementptr_text,
    instr.ICMPInstr: _compare_text,
    instr.InsertElement: _typed_operation_text,
    instr.InsertValue: _aggregate_indices_text,
    instr.LoadAtomicInstr: _atomic_load_text,
    instr.LoadInstr: _load_text,
    instr.PhiInstr: _phi_text,
    instr.Ret: _typed_operation_text,
    instr.SelectInstr: _typed_operation_text,
    instr.ShuffleVector: _typed_operation_text,
    instr.StoreAtomicInstr: _atomic_store_text,
    instr.StoreInstr: _store_text,
    instr.SwitchInstr: _switch_text,
    instr.Unreachable: _typed_operation_text,
}
