"""Execution engines: run LLVM IR in this process, for tests and for loops whose speed is a bound."""

from __future__ import annotations

import llvmlite.binding as llvm

from aotc.targets import Target


def load_module(module: llvm.ModuleRef | str, target: Target | None = None) -> llvm.ExecutionEngine:
    """Compile a module or its text for ``target``, by default for this machine, and load it into this process.

    The engine owns the module and its target machine, so the machine must not be one of the back end's.

    MCJIT maps each section of the object to free memory. In a process with many mappings, code and constants can be
    more than 2 GiB apart, beyond a relocation of 32 bits. The large code model has 64-bit addresses.
    """
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    options = {"cpu": target.cpu, "features": target.llvm_features, "opt": 3} if target else {}
    triple = target.triple if target else llvm.get_default_triple()
    machine = llvm.Target.from_triple(triple).create_target_machine(**options, codemodel="large")
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(module) if isinstance(module, str) else module, machine)
    engine.finalize_object()
    return engine
