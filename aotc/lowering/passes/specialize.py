"""Add copies of functions for given sizes of symbolic dims.

Before: ``main(%x: f32[b, 4])`` with ``specialize={"b": (1, 8)}``. After: also ``main_b1(%x: f32[1, 4])`` and
``main_b8(%x: f32[8, 4])``, whose attribute ``specializes`` names ``main``. The host program of ``main`` calls the copy
with the sizes of the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from aotc.diagnostics import CompileError
from aotc.ir.dims.symbols import symbols
from aotc.ir.tensor.ir import Function, Module
from aotc.ir.tensor.substitute_dims import with_dims
from aotc.lowering.analysis.specialized_dims import fixed_dims
from aotc.options import Options

# Copies of the functions of a module for given sizes. Each is compiled in full.
SPECIALIZATIONS = 64


def specialize(module: Module, options: Options) -> Module:
    """Return ``module`` with a copy of each entry for every combination of ``options.specialize``.

    Raises
    ------
    CompileError
        If no public function has such a dim, a size is negative or a typical size 0, or there would be more than 64
        copies.
    """
    sizes_of = {name: tuple(map(int, sizes)) for name, sizes in options.specialize.items()}
    entries = [f for f in module.functions.values() if f.public]
    _check_specialized_dims(entries, "typical", {name: (int(size),) for name, size in options.typical.items()}, 1)
    _check_specialized_dims(entries, "specialize", sizes_of, 0)
    if not sizes_of:
        return module
    copies = {c.name: c for f in entries for c in _specialized_copies(f, sizes_of, set(module.functions))}
    if len(copies) > SPECIALIZATIONS:
        message = f"specialize: {len(copies)} combinations of sizes, expected at most {SPECIALIZATIONS}"
        raise CompileError.at(entries[0].loc, message, hint="list fewer sizes")
    return module.with_functions(copies)


def _check_specialized_dims(
    entries: Sequence[Function], option: str, sizes_of: Mapping[str, tuple[int, ...]], least: int
) -> None:
    """Raise an error if no function has a dim of ``option``, or if a size of it is below ``least``."""
    dims = {s.name for f in entries for s in _parameter_symbols(f)} if sizes_of else set()
    sizes_of = {name: sizes for name, sizes in sizes_of.items() if name in dims or not _is_of_buckets(name, entries)}
    for name, sizes in sizes_of.items():
        if name not in dims:
            hint = f"its dims: {', '.join(sorted(dims))}" if dims else "none: all its sizes are fixed"
            raise CompileError.at(entries[0].loc, f"{option}: no dim is called {name}", hint=hint)
        if any(n < least for n in sizes):
            message = f"{option}: {name} has the sizes {', '.join(map(str, sizes))}"
            raise CompileError.at(entries[0].loc, message, hint=f"integers from {least} on")


def _is_of_buckets(name: str, entries: Sequence[Function]) -> bool:
    """Return True if the model has a function for each size of a dim already, as a sharded one has."""
    rows = [f.attrs["bucket"] for f in entries if "bucket" in f.attrs]
    return any(name in row["sizes"] for row in rows)


def _parameter_symbols(f: Function) -> set:
    return {s for p in f.body.params for d in p.type.shape for s in symbols(d)}


def _specialized_copies(f: Function, sizes_of: Mapping[str, tuple[int, ...]], taken: set[str]) -> Iterator[Function]:
    """Yield a copy of ``f`` for every combination of sizes of its dims, with a name that is not in ``taken``."""
    names = sorted(s.name for s in _parameter_symbols(f) if s.name in sizes_of)
    for sizes in product(*(sizes_of[n] for n in names)) if names else ():
        dims = dict(zip(names, sizes))
        name = "_".join([f.name, *(f"{n}{size}" for n, size in dims.items())])
        while name in taken:
            name += "_"
        taken.add(name)
        copy = with_dims(f, dims)
        if not fixed_dims(f, copy):
            message = f"specialize: sizes of {', '.join(names)} alone fix no dim of an argument of {f.name}"
            raise CompileError.at(f.loc, message, hint="also give sizes of the other symbols in these dims")
        yield replace(copy, name=name, attrs={**copy.attrs, "specializes": f.name, "dims": dims})
