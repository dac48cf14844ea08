"""Calls of slow paths for rare arguments, such as huge angles, that do not prevent vectorization of a loop.

A formula calls a function of a flag, the usual result and the arguments, e.g. ``aotc.rarely.remainder``. During
optimization the function is a declaration without effects that has a vector variant for each width (``LANES``), so that
LLVM vectorizes loops that call it. The definitions come afterwards (:func:`link_rare_functions`): a branch, taken only
if a lane is rare, around a call that processes the lanes one by one.
"""

from __future__ import annotations

import re
from functools import cache

from llvmlite import ir

from aotc.kernels.back_end import Library, codegen_for
from aotc.kernels.emit.vector.sve import with_vector_length
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.formulas.rare import CHOICE, RARE, choice_function
from aotc.kernels.llvm_types import F64, I1, I64, KernelModule, i64
from aotc.targets import Target

# Vector widths for which LLVM may vectorize a loop that calls a function for rare arguments; the function has a form
# for each width. The widest registers have 8 doubles, twice as many in loops whose other values are half as wide.
LANES = (2, 4, 8, 16)


_KEPT, _USED = "llvm.compiler.used", "aotc.used"
_DECLARATION = re.compile(rf'declare double @"({re.escape(CHOICE)}(\w+))"\(.*\)')


def annotate_rare_calls(text: str) -> str:
    """Add attributes to the slow-path functions declared in a module's text: no effects, and their vector variants."""
    found = [m[2] for m in _DECLARATION.finditer(text)]
    if not found:
        return text
    forms = [(name, lanes) for name in found for lanes in LANES]
    symbols = ", ".join(f'ptr @"{_vector_variant_name(name, lanes)}"' for name, lanes in forms)
    kept = f'@{_KEPT} = appending global [{len(forms)} x ptr] [{symbols}], section "llvm.metadata"'
    return "\n".join(
        [
            _DECLARATION.sub(_declaration_without_effects, text),
            *(_rare_function_declaration(*f) for f in forms),
            kept,
            "",
        ]
    )


def _vector_variant_name(name: str, lanes: int) -> str:
    return f"{CHOICE}{name}.v{lanes}"


def _declaration_without_effects(declaration: re.Match[str]) -> str:
    symbol, name = declaration.groups()
    vectors = "v" * (2 + len(RARE[name][0]))
    forms = ",".join(f"_ZGV_LLVM_N{lanes}{vectors}_{symbol}({_vector_variant_name(name, lanes)})" for lanes in LANES)
    facts = f'memory(none) nounwind willreturn speculatable "vector-function-abi-variant"="{forms}"'
    return f"{declaration[0]} {facts}"


def _rare_function_types(name: str, lanes: int) -> list[ir.Type]:
    return [ir.VectorType(kind, lanes) for kind in (I64, F64, *RARE[name][0])]


def _rare_function_declaration(name: str, lanes: int) -> str:
    types = ", ".join(map(str, _rare_function_types(name, lanes)))
    return f'declare <{lanes} x double> @"{_vector_variant_name(name, lanes)}"({types})'


def define_scalar_rare_functions(module: ir.Module) -> None:
    """Define in ``module`` the slow-path functions that it calls, for a machine without vectors."""
    for symbol in [name for name in module.globals if name.startswith(CHOICE)]:
        _define_scalar_variant(_add_rare_function(module, symbol.removeprefix(CHOICE)), module.globals[symbol])
        module.globals[symbol].linkage = "internal"


def calls_rarely(text: str) -> bool:
    """Return True if a kernel's LLVM text calls slow paths for rare arguments."""
    return CHOICE in text


def link_rare_functions(library: Library, target: Target) -> bool:
    """Link all variants of the slow-path functions that ``library`` calls; return True if there are any."""
    module = library.module
    forms = {f.name for f in module.functions if f.name.startswith(CHOICE)}
    names = sorted({form.removeprefix(CHOICE).partition(".")[0] for form in forms})
    if not names:
        return False
    data = _rare_function_definitions(target, tuple(names), module.triple, module.data_layout)
    library.link(codegen_for(target).parse_bitcode(data))
    for variable in module.global_variables:
        if variable.name == _KEPT:  # nothing else keeps variants that no loop uses
            variable.linkage, variable.name = "internal", _USED
    for function in module.functions:
        if function.name.startswith(CHOICE):
            function.linkage = "internal"
    return True


@cache
def _rare_function_definitions(target: Target, names: tuple[str, ...], triple: str, data_layout: str) -> bytes:
    """Return the definitions of slow-path functions for a target, as LLVM bitcode."""
    module = KernelModule("rare", target)
    module.triple, module.data_layout = triple, data_layout
    for name in names:
        function = _add_rare_function(module, name)
        _define_scalar_variant(function, choice_function(module, name))
        for lanes in LANES:
            _define_vector_variant(function, name, lanes)
    return codegen_for(target).parse(with_vector_length(str(module), target)).emit_bitcode()


def _add_rare_function(module: ir.Module, name: str) -> ir.Function:
    """Add to ``module`` the formula for rare arguments that the slow path ``name`` calls."""
    types, emit = RARE[name]
    function = ir.Function(module, ir.FunctionType(F64, types), f"aotc.{name}")
    function.linkage = "internal"
    for attribute in ("noinline", "nounwind", "cold"):
        function.attributes.add(attribute)
    emit(function)
    return function


def _define_scalar_variant(function: ir.Function, choice: ir.Function) -> None:
    """Define the scalar variant of a slow-path function; ``function`` is its formula."""
    choice.attributes.add("alwaysinline")
    builder = ir.IRBuilder(choice.append_basic_block("entry"))
    flag, usual, *args = choice.args
    _choose_rare_or_usual(builder, builder.icmp_signed("!=", flag, i64(0)), usual, function, args)


def _choose_rare_or_usual(
    builder: ir.IRBuilder, rare: ir.Value, usual: ir.Value, function: ir.Function, args: list[ir.Value]
) -> None:
    """Emit a branch on ``rare`` that calls ``function``, and else returns the usual result."""
    before = builder.block
    with builder.if_then(rare, likely=False):
        found = builder.call(function, args)
        inside = builder.block
    result = builder.phi(usual.type)
    result.add_incoming(usual, before)
    result.add_incoming(found, inside)
    builder.ret(result)


def _define_vector_variant(function: ir.Function, name: str, lanes: int) -> None:
    """Define the variant for ``lanes`` lanes: a branch, and a function that it calls if any lane is rare."""
    module = function.module
    types, result = _rare_function_types(name, lanes), ir.VectorType(F64, lanes)
    each = ir.Function(module, ir.FunctionType(result, types), f"aotc.{name}.v{lanes}")
    each.linkage = "internal"
    for attribute in ("noinline", "nounwind", "cold"):
        each.attributes.add(attribute)
    _visit_lanes(each, function, lanes)
    form = ir.Function(module, ir.FunctionType(result, types), _vector_variant_name(name, lanes))
    form.attributes.add("alwaysinline")
    builder = ir.IRBuilder(form.append_basic_block("entry"))
    some = builder.icmp_signed("!=", form.args[0], ir.Constant(types[0], [0] * lanes))
    any_rare = call_intrinsic(builder, f"llvm.vector.reduce.or.v{lanes}i1", I1, [some])
    _choose_rare_or_usual(builder, any_rare, form.args[1], each, list(form.args))


def _visit_lanes(each: ir.Function, function: ir.Function, lanes: int) -> None:
    """Emit a loop over lanes that calls the formula for each lane with a rare argument."""
    flags, usual, *args = each.args
    entry, head, rare, iteration, done = (each.append_basic_block(n) for n in ("entry", "head", "rare", "turn", "done"))
    builder = ir.IRBuilder(entry)
    builder.branch(head)
    builder.position_at_end(head)
    at, held = builder.phi(I64), builder.phi(usual.type)
    flag = builder.extract_element(flags, at)
    builder.cbranch(builder.icmp_signed("!=", flag, i64(0)), rare, iteration)
    builder.position_at_end(rare)
    found = builder.call(function, [builder.extract_element(a, at) for a in args])
    changed = builder.insert_element(held, found, at)
    builder.branch(iteration)
    builder.position_at_end(iteration)
    now = builder.phi(usual.type)
    now.add_incoming(held, head)
    now.add_incoming(changed, rare)
    following = builder.add(at, i64(1))
    builder.cbranch(builder.icmp_signed("<", following, i64(lanes)), head, done)
    at.add_incoming(i64(0), entry)
    at.add_incoming(following, iteration)
    held.add_incoming(usual, entry)
    held.add_incoming(now, iteration)
    builder.position_at_end(done)
    builder.ret(now)
