"""What LLVM is told that it cannot see: which accesses of memory are apart, and how to treat loops."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from llvmlite import ir

from aotc.ir.loop_ir import Alloc, Buffer, ExternalCall, For, Kernel, Store, Tile, While, walk
from aotc.targets import Target

_MARK = "aotc.distinct"
_LOOP = re.compile(rf'^(!\d+) = !\{{ !"{_MARK}", !"\d+", (.*) \}}$', re.MULTILINE)
_GROUP = re.compile(rf'^(!\d+) = !\{{ !"{_MARK}" \}}$', re.MULTILINE)


def assembly_text(module: ir.Module) -> str:
    """Return the LLVM assembly of ``module``.

    llvmlite cannot write nodes that are distinct or name themselves, as the
    metadata of loops must: they are marked, and rewritten in the text.
    """
    text = _LOOP.sub(r"\1 = distinct !{\1, \2}", str(module))
    return _GROUP.sub(r"\1 = distinct !{}", text)


def invariant(load: ir.Instruction) -> ir.Value:
    """Say that nothing writes to what is loaded, and return the load."""
    load.set_metadata("invariant.load", load.module.add_metadata([]))
    return load


def _independent(loop: For) -> bool:
    """Are the iterations independent, given that global memory is only touched where it is written?"""
    return all(
        not isinstance(s, Tile | While | Alloc | ExternalCall)
        and not (isinstance(s, Store) and s.buffer.space != "global")
        for s in walk(loop.body)
    )


def _groups(kernel: Kernel) -> dict[str, str]:
    """Return for each parameter of ``kernel`` the one that stands for all that may be the same memory."""
    group = {b.name: b.name for b in (*kernel.inputs, *kernel.outputs)}
    for output, source in kernel.aliases:
        old, new = group[kernel.outputs[output].name], group[kernel.inputs[source].name]
        group = {name: new if g == old else g for name, g in group.items()}
    return group


class Metadata:
    """The metadata of one kernel: of its accesses of memory and of its loops.

    Each buffer has an alias scope of the whole function, and so have those
    together that may be one memory. Buffers that may share memory are only
    touched at the element that an iteration writes, so the accesses of a loop
    without state are independent; LLVM believes that only if every access of the
    loop says so.

    Parameters
    ----------
    module : llvmlite.ir.Module
        Where the metadata goes.
    kernel : Kernel
        The loop IR.
    target : Target
        The machine.
    scratch : iterable of str
        The names of the buffers in a worker's scratch memory.
    """

    def __init__(self, module: ir.Module, kernel: Kernel, target: Target, scratch: Iterable[str]) -> None:
        self._module, self._target = module, target
        self._tags: dict[str, tuple[ir.MDValue, ir.MDValue]] = {}
        self._parallel: ir.MDValue | None = None
        self._loops = 0
        group = _groups(kernel) | {name: name for name in scratch}
        domain = module.add_metadata([kernel.name])
        names = list(dict.fromkeys(group.values()))
        scopes = {name: module.add_metadata([name, domain]) for name in names}
        for name, own in group.items():
            others = module.add_metadata([scopes[n] for n in names if n != own])
            self._tags[name] = (module.add_metadata([scopes[own]]), others)
        if kernel.aliases and target.kind == "cpu":
            self._parallel = module.add_metadata([_MARK])

    def annotation(self, buffer: Buffer) -> Callable[[ir.Instruction], None]:
        """Return what says of a load or store of ``buffer`` which memory it cannot touch."""
        tag = self._tags.get(buffer.name)

        def annotate(instruction: ir.Instruction) -> None:
            if tag is not None:
                instruction.set_metadata("alias.scope", tag[0])
                instruction.set_metadata("noalias", tag[1])
            if self._parallel is not None:
                instruction.set_metadata("llvm.access.group", self._parallel)

        return annotate

    def describe(self, loop: For, backedge: ir.Instruction) -> None:
        """Say at the end of ``loop`` if its iterations are independent, and not to unroll one around loops in vain."""
        module = self._module
        facts = []
        if self._parallel is not None and _independent(loop):
            facts.append(module.add_metadata(["llvm.loop.parallel_accesses", self._parallel]))
        if any(isinstance(s, For) for s in walk(loop.body)) and self._target.kind == "cpu":
            facts.append(module.add_metadata(["llvm.loop.unroll.disable"]))
        if facts:
            self._loops += 1
            backedge.set_metadata("llvm.loop", module.add_metadata([_MARK, str(self._loops), *facts]))
