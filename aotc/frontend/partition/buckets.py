"""Sharded programs with symbolic sizes: one program of a rank for each of the listed sizes, a *bucket*.

XLA partitions programs with known sizes only. A function is traced for each bucket. In a program that JAX exported,
sizes replace the symbols, and JAX's refinement of shapes computes all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, Protocol, TypeGuard, cast

import jax
import numpy as np
from jaxlib import _jax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.contexts import make_context
from aotc.frontend.entry_attrs import argument_locations
from aotc.frontend.jax_program import is_program
from aotc.frontend.mlir import (
    RawModel,
    fetch_whole,
    is_for_several_devices,
    parse_model,
    program_of_one_rank,
    upgrade_module,
)
from aotc.frontend.mlir_types import is_private, module_bytes
from aotc.frontend.partition.meshes import is_on_mesh

# Maximum number of buckets of a model. A separate process partitions each bucket, and its code is not shared.
MOST_BUCKETS = 64
# JAX's exceptions for dims of unknown size: that a mesh axis should cut, and of any operation on dims.
_UNDECIDED_CUT, _UNDECIDED = "IndivisibleError", "InconclusiveDimensionOperation"

Sizes = Mapping[str, Sequence[int]]


def fetch_buckets(
    source: object, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes
) -> dict[tuple[tuple[str, int], ...], RawModel]:
    """Read a model; of a sharded one with symbolic sizes, return the program of one rank for each bucket.

    Parameters
    ----------
    source, args, kwargs
        As for :func:`aotc.frontend.mlir.fetch`.
    sizes : mapping of str to sequence of int
        The sizes of each symbol.

    Returns
    -------
    dict
        Models by the sizes of their symbols; any other model has none: its key is ``()``.

    Raises
    ------
    CompileError
        If the model cannot be read or partitioned, or if ``sizes`` lacks a symbol of a sharded model.
    """
    symbols = _symbols_of_examples((args, kwargs)) if is_program(source) else set()
    traced = partial(_traced_for_buckets, source, args, kwargs, symbols, sizes)
    if symbols and is_on_mesh(source):
        return traced()
    try:
        raw = fetch_whole(source, args, kwargs)
    except CompileError as error:
        if not symbols or not _is_sharded(error, source, args, kwargs, sizes):
            raise
        return traced()
    if symbols and is_for_several_devices(raw):
        return traced()
    if (shapes := raw.metadata.get("shapes")) and is_for_several_devices(raw):
        dims = [_parsed_shape(shape) for shape in shapes]
        symbols = {name for shape in dims for dim in shape for name in _symbols_of_dim(dim)}
        combinations = _combinations(symbols, sizes, raw.path)
        return {tuple(chosen.items()): program_of_one_rank(_refined(raw, dims, chosen)) for chosen in combinations}
    return {(): program_of_one_rank(raw)}


def _is_sharded(
    error: CompileError, source: object, args: Sequence[Any], kwargs: Mapping[str, Any], sizes: Sizes
) -> bool:
    """Return True if a function is for several devices, whose trace for symbolic sizes failed with ``error``.

    A mesh axis can only cut a known size. Other operations on symbolic sizes fail in any function: it is then traced
    for the first of the listed sizes.
    """
    cause = type(error.__cause__).__name__
    symbols = _symbols_of_examples((args, kwargs))
    if cause != _UNDECIDED or not all(sizes.get(name) for name in symbols):
        return cause == _UNDECIDED_CUT
    chosen = {name: int(min(sizes[name])) for name in symbols}
    examples, keywords = jax.tree.map(partial(_with_sizes, chosen=chosen), (tuple(args), {**kwargs}))
    try:
        return is_for_several_devices(fetch_whole(source, examples, keywords))
    except CompileError:
        return False  # the error for symbolic sizes has the reason


def _traced_for_buckets(
    source: object, args: Sequence[Any], kwargs: Mapping[str, Any], symbols: set[str], sizes: Sizes
) -> dict[tuple[tuple[str, int], ...], RawModel]:
    """Return the program of a rank for each bucket, by the sizes of its symbols."""
    models = {}
    for chosen in _combinations(symbols, sizes):
        with _named_bucket(chosen):
            examples, keywords = jax.tree.map(partial(_with_sizes, chosen=chosen), (tuple(args), {**kwargs}))
            models[tuple(chosen.items())] = program_of_one_rank(fetch_whole(source, examples, keywords))
    return models


@contextmanager
def _named_bucket(chosen: Mapping[str, int]) -> Iterator[None]:
    """Name the bucket in errors of the block."""
    try:
        yield
    except CompileError as error:
        text = ", ".join(f"{name}={size}" for name, size in chosen.items())
        error.findings = [replace(f, message=f"for {text}: {f.message}") for f in error.findings]
        raise


def _combinations(symbols: set[str], sizes: Sizes, path: str = "") -> list[dict[str, int]]:
    """Return the sizes of each bucket.

    Raises
    ------
    CompileError
        If a symbol has no sizes, a size has no symbol or is not positive, or there are more than 64 buckets.
    """
    names = sorted(symbols)
    if missing := [name for name in names if not sizes.get(name)]:
        message = f"the model is for several devices, and its size {missing[0]} is not known"
        hint = f"the sizes to compile for: specialize={{{missing[0]!r}: (8, 16)}}, or --specialize {missing[0]}=8,16"
        raise CompileError.at(Loc(path), message, hint=hint)
    if unknown := [name for name in sizes if name not in symbols]:
        message = f"specialize: no dim is called {unknown[0]}"
        raise CompileError.at(Loc(path), message, hint=f"its dims: {', '.join(names)}")
    if wrong := [f"{name}={n}" for name in names for n in sizes[name] if n < 1]:
        raise CompileError.at(Loc(path), f"specialize: {wrong[0]}", hint="integers from 1 on")
    buckets = [dict(zip(names, numbers)) for numbers in product(*(sorted(map(int, sizes[name])) for name in names))]
    if len(buckets) > MOST_BUCKETS:
        message = f"specialize: {len(buckets)} combinations of sizes, expected at most {MOST_BUCKETS}"
        raise CompileError.at(Loc(path), message, hint="list fewer sizes")
    return buckets


def _symbols_of_examples(examples: object) -> set[str]:
    """Return the symbols in the shapes of example arguments."""
    try:
        leaves = jax.tree.leaves(examples)
    except Exception:  # a container that JAX cannot flatten; tracing reports it
        return set()
    shapes = [leaf.shape for leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]
    return {name for shape in shapes for dim in shape for name in _symbols_of_dim(dim)}


class SymbolicDim(Protocol):
    """Symbolic size of JAX: the two private methods that this module calls."""

    def _get_vars(self) -> set[str]: ...

    def _evaluate(self, sizes: dict[str, int]) -> int: ...


Dim = int | np.integer[Any] | SymbolicDim


def _symbols_of_dim(dim: Dim) -> set[str]:
    """Return the symbols of a dim; none of an invalid one, which tracing reports."""
    return set(dim._get_vars()) if _is_symbolic(dim) else set()


def _size_of_dim(dim: Dim, chosen: Mapping[str, int]) -> int:
    """Return the size of a dim; an invalid one is returned as it is, and tracing reports it."""
    return int(dim._evaluate(dict(chosen))) if _is_symbolic(dim) else cast(int, dim)


def _is_symbolic(dim: Dim) -> TypeGuard[SymbolicDim]:
    return bool(jax.export.is_symbolic_dim(dim))


def _with_sizes(leaf: object, chosen: Mapping[str, int]) -> object:
    """Return an example argument with sizes in place of symbols."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    shape = tuple(_size_of_dim(dim, chosen) for dim in leaf.shape)
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)


def _parsed_shape(shape: Sequence[int | str]) -> tuple[Dim, ...]:
    """Return the dims of a shape that is stored as text."""
    dims: tuple[Dim, ...] = jax.export.symbolic_shape(", ".join(map(str, shape)) + ("," if shape else ""))
    return dims


def _refined(raw: RawModel, dims: Sequence[Sequence[Dim]], chosen: Mapping[str, int]) -> RawModel:
    """Return an exported program with sizes in place of its symbols.

    Raises
    ------
    CompileError
        If the program does not allow these sizes, or JAX cannot compute a size.
    """
    shapes = [[_size_of_dim(dim, chosen) for dim in shape] for shape in dims]
    with _named_bucket(chosen), make_context() as context, ir.Location.unknown(context):
        module = parse_model(raw.code)
        upgrade_module(module)
        (main,) = (op for op in module.body.operations if op.operation.name == "func.func" and not is_private(op))
        _set_argument_shapes(main, [shapes[n] for n in raw.metadata["kept"]])
        try:
            code = _jax.mlir.refine_polymorphic_shapes(
                module_bytes(module), enable_shape_assertions=True, validate_static_shapes=True
            )
        except Exception as error:  # of XLA
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CompileError.at(Loc(raw.path), f"JAX cannot compute all sizes: {' '.join(lines[:2])}") from error
        written = module_bytes(ir.Module.parse(code))
    metadata = {key: value for key, value in raw.metadata.items() if key != "shapes"}
    return RawModel(written, raw.path, metadata, digest=b"")


def _set_argument_shapes(main: ir.OpView, shapes: Sequence[Sequence[int]]) -> None:
    """Give arguments known shapes; their users read a conversion to the type that they had.

    Arguments get the names that the function has which the exported one wraps: refinement inlines it.
    """
    block = main.regions[0].blocks[0]
    for argument, location in zip(block.arguments, argument_locations(main, block), strict=True):
        argument.set_location(location)
    for argument, shape in zip(block.arguments, shapes, strict=True):
        old_type = argument.type
        if not isinstance(old_type, ir.RankedTensorType) or old_type.has_static_shape:
            continue
        argument.set_type(ir.RankedTensorType.get(shape, old_type.element_type))
        with ir.InsertionPoint.at_block_begin(block):
            own = stablehlo.ConvertOp(old_type, argument)
        argument.replace_all_uses_except(own.result, own.operation)
    types = [argument.type for argument in block.arguments]
    main.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, main.type.results))
