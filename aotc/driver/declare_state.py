"""Annotate bound arguments and states: memory that one call passes to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aotc.diagnostics import CompileError
from aotc.ir.tensor.ir import Function, Module
from aotc.lowering.passes.bind_weights import bound_arguments
from aotc.options import Options
from aotc.vmfb.result_names import parse_state_pairs, path_below_result


def declare_bindings(module: Module, options: Options) -> Module:
    """Annotate the arguments that ``options.bind`` and ``options.state`` select, and return the module.

    Arguments of a state are donated, each to its result.

    Raises
    ------
    CompileError
        If a result or an argument does not exist, or the two are of different types.
    """
    bound = {f.name: bound_arguments(f, options.bind) for f in module.functions.values() if f.public}
    noted = {n: module.functions[n] for n, numbers in bound.items() if numbers}
    module = module.with_functions(
        {n: replace(f, attrs={**f.attrs, "bound": list(bound[n])}) for n, f in noted.items()}
    )
    pairs = parse_state_pairs(options.state)
    used: set[str] = set()
    with_state = {}
    for f in module.functions.values():
        if f.public and pairs:
            donated, own = _state_result_numbers(f, pairs)
            used |= own.keys()
            if own:
                attrs = {
                    "donated": sorted({*f.attrs.get("donated", ()), *donated}),
                    "donated_into": {**f.attrs.get("donated_into", {}), **{str(a): r for a, r in donated.items()}},
                }
                with_state[f.name] = replace(f, attrs={**f.attrs, **attrs, "state": own})
    if pairs:
        _check_state_pairs_used(module, pairs, used, with_state)
    return module.with_functions(with_state)


def _check_state_pairs_used(
    module: Module, pairs: dict[str, str], used: set[str], with_state: Mapping[str, Function]
) -> None:
    """Reject a state pair (result, argument) that no function has."""
    public = [f for f in module.functions.values() if f.public]
    unused = [(out, argument) for out, argument in pairs.items() if out not in used]
    arguments = [n for f in public for n in f.attrs["arg_names"]]
    if unused:
        out, argument = unused[0]
        names = [n for f in public for n in f.attrs["result_names"]]
        what = f"state: no function has a result {out!r} and an argument {argument!r}"
        hint = f"RESULT=ARGUMENT; results: {', '.join(names)}"[:400] + f"; arguments: {', '.join(arguments)}"[:400]
        raise CompileError.at(public[0].loc, what, hint=hint)
    for f in with_state.values():
        for out, argument in f.attrs["state"].items():
            paths = [path_below_result(n, out, argument, arguments) for n in f.attrs["result_names"]]
            leaves = [argument + path for path in paths if path is not None]
            if not set(leaves) & set(arguments):
                what = f"state: {out!r} becomes {', '.join(leaves)}, which no function takes"
                raise CompileError.at(f.loc, what[:400], hint=f"arguments: {', '.join(arguments)}"[:400])


def _state_result_numbers(f: Function, pairs: dict[str, str]) -> tuple[dict[int, int], dict[str, str]]:
    """Return the result number for each state argument of ``f``, and the matching pairs of ``f``."""
    names = list(f.attrs["arg_names"])
    donated: dict[int, int] = {}
    own: dict[str, str] = {}
    for number, (name, value) in enumerate(zip(f.attrs["result_names"], f.body.results, strict=True)):
        for out, argument in pairs.items():
            path = path_below_result(name, out, argument, names)
            if path is None:
                continue
            own[out] = argument  # a function may produce a state that it does not take
            fed = argument + path
            if fed in names:
                place = names.index(fed)
                argument_type = f.body.params[place].type
                if argument_type != value.type:
                    message = f"state: result {name} is {value.type}, but argument {fed} is {argument_type}"
                    raise CompileError.at(f.loc, message, hint="a state keeps its type from call to call")
                donated[place] = number
    return donated, own
