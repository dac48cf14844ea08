"""LLVM as a back end: a machine for each target, and what is done to a module until it is an object."""

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
"""Two passes that drop what is not used."""


def target_machine(target: Target, level: int = 3) -> llvm.TargetMachine:
    """Return LLVM's machine for ``target``, the calling thread's: position independent, of an optimization level."""
    own: dict[tuple[Target, int], llvm.TargetMachine] = _MACHINES.__dict__.setdefault("own", {})
    if (target, level) not in own:
        _initialize()
        own[target, level] = llvm.Target.from_triple(target.triple).create_target_machine(
            cpu=target.cpu, features=target.llvm_features, opt=level, reloc="pic", codemodel="default"
        )
    return own[target, level]


@cache
def data_layout(target: Target) -> str:
    """Return what LLVM's modules for ``target`` say of how data lies in memory."""
    return str(target_machine(target).target_data)


@cache
def _initialize() -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()


def retarget(module: llvm.ModuleRef, target: Target) -> None:
    """Make ``module`` one for ``target``, which must be 64-bit and little-endian."""
    module.triple = target.triple
    module.data_layout = str(target_machine(target).target_data)


def internalize(module: llvm.ModuleRef, keep: Iterable[str]) -> None:
    """Hide every defined symbol but ``keep``, so that LLVM may inline and drop it."""
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
    """Run LLVM's pipeline of a ``level``, O3, for ``target``, then drop what is not used.

    ``loops`` are made vectors and unrolled; code of which no loop takes long is a quarter smaller without.
    """
    unlocked.run_passes(module, target_machine(target), _DROP, (level, loops))


def simplify(module: llvm.ModuleRef, target: Target, unroll: bool) -> None:
    """Inline, put what lies on the stack in registers, and tidy up; loops are unrolled that say how often, or none."""
    _run(module, target, "AlwaysInliner", "SROA", "InstCombine", "SimplifyCFG", *(["LoopUnroll"] if unroll else []))


def inline_late(module: llvm.ModuleRef, target: Target) -> None:
    """Inline what was linked to ``module`` after it was optimised."""
    _run(module, target, "AlwaysInliner", "InstCombine", "SimplifyCFG")


def tidy(module: llvm.ModuleRef, target: Target) -> None:
    """Make a module smaller that a front end wrote, without what only some targets gain by."""
    _run(module, target, "SROA", "SimplifyCFG", "InstCombine")


def _run(module: llvm.ModuleRef, target: Target, *passes: str) -> None:
    """Run ``passes`` in their order, then drop what is not used."""
    unlocked.run_passes(module, target_machine(target), (*passes, *_DROP))


def emit_object(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the relocatable object of ``module``."""
    return unlocked.emit_object(target_machine(target), module)


def emit_data(module: llvm.ModuleRef, target: Target) -> bytes:
    """Return the relocatable object of a module without code, which the machine of the lowest level makes as well."""
    return unlocked.emit_object(target_machine(target, 0), module)
