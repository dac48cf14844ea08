"""LLVM as a back end: a target machine for each target, and the passes from a module to an object."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from functools import cache

import llvmlite.binding as llvm

from aotc.kernels import unlocked
from aotc.targets import Target

# C library functions that LLVM substitutes for plain loops; every C program has them.
LIBC_ALLOWED = frozenset({"memset", "memcpy", "memmove"})

_MACHINES = threading.local()
_DROP = "GlobalDCE", "StripDeadPrototypes"
"""Two passes that remove unused symbols."""


def target_machine(target: Target, level: int = 3) -> llvm.TargetMachine:
    """Return the calling thread's LLVM machine for ``target``: position independent, of optimization ``level``."""
    own: dict[tuple[Target, int], llvm.TargetMachine] = _MACHINES.__dict__.setdefault("own", {})
    if (target, level) not in own:
        _initialize()
        own[target, level] = llvm.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=target.llvm_features, opt=level, reloc="pic", codemodel="default"
        )
    return own[target, level]


@cache
def data_layout(target: Target) -> str:
    """Return the data layout string of LLVM modules for ``target``."""
    return str(target_machine(target).target_data)


@cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def retarget(module: llvm.ModuleRef, target: Target) -> None:
    """Set the triple and data layout of ``module``; the target must be 64-bit and little-endian."""
    module.triple = target.triple
    module.data_layout = str(target_machine(target).target_data)


def internalize(module: llvm.ModuleRef, keep: Iterable[str]) -> None:
    """Make all defined symbols but ``keep`` internal, so that LLVM may inline and remove them."""
    names = set(keep)
    for function in module.functions:
        if function.is_declaration:
            continue
        function.add_function_attribute("nounwind")
        if function.name not in names:
            function.linkage = "internal"
            if b"noinline" not in b" ".join(function.attributes):
                function.add_function_attribute("alwaysinline")
    for variable in module.global_variables:
        if not variable.is_declaration and variable.name not in names and not variable.name.startswith("llvm."):
            variable.linkage = "internal"


def optimize(module: llvm.ModuleRef, target: Target, loops: bool = True, level: int = 3) -> None:
    """Run LLVM's pipeline of ``level`` (O3) for ``target``, then remove unused symbols.

    ``loops`` enables vectorization and unrolling; code without hot loops is a quarter smaller without.
    """
    unlocked.run_passes(module, target_machine(target), _DROP, (level, loops))


def simplify(module: llvm.ModuleRef, target: Target, unroll: bool) -> None:
    """Inline, promote stack variables to registers, and clean up; ``unroll`` unrolls loops with an explicit count."""
    _run(module, target, "AlwaysInliner", "SROA", "InstCombine", "SimplifyCFG", *(["LoopUnroll"] if unroll else []))


def inline_late(module: llvm.ModuleRef, target: Target) -> None:
    """Inline functions that were linked to ``module`` after its optimization."""
    _run(module, target, "AlwaysInliner", "InstCombine", "SimplifyCFG")


def tidy(module: llvm.ModuleRef, target: Target) -> None:
    """Shrink a module that a front end wrote, by passes that do not depend on the target."""
    _run(module, target, "SROA", "SimplifyCFG", "InstCombine")


def _run(module: llvm.ModuleRef, target: Target, *passes: str) -> None:
    """Run ``passes`` in order, then remove unused symbols."""
    unlocked.run_passes(module, target_machine(target), (*passes, *_DROP))


def emit_object(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the relocatable object of ``module``."""
    return unlocked.emit_object(target_machine(target), module)


def emit_data(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the relocatable object of a module without code; a machine of the lowest level is enough."""
    return unlocked.emit_object(target_machine(target, 0), module)
