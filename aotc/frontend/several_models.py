"""Merge several models into one module with a public function for each, so that they share constants and kernels.

Each model is fetched separately. Its public function gets the name that the caller gave to the model; other symbols
are renamed on conflicts. ``metadata["entries"]`` has JAX's metadata of each model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.contexts import make_context
from aotc.frontend.locations import name_file
from aotc.frontend.mlir import (
    NO_KEYWORDS,
    RawModel,
    fetch,
    fetch_whole,
    is_read,
    name_of_model_text,
    parse_model,
    read_source,
    upgrade_module,
)
from aotc.frontend.mlir_types import is_private, module_bytes
from aotc.guard import guard
from aotc.options import Options

_SYMBOL = "sym_name"
Buckets = tuple[tuple[str, int], ...]
_OF_ALL = ("callbacks", "platforms")  # metadata of the whole module


def fetch_any(
    model: Any, examples: Sequence[Any] = (), args: Any = None, kwargs: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Sequence[int]] = NO_KEYWORDS,
) -> RawModel:  # fmt: skip
    """Fetch one model, or merge several given by name, with their example arguments; see :func:`aotc.compile`.

    A sharded model with symbolic dims has a function for each combination of their ``sizes``.

    Raises
    ------
    CompileError
        As :func:`aotc.frontend.mlir.fetch`; or if examples belong to none of the models, or if two models conflict.
    """
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(model, Mapping):
        if not isinstance(kwargs, Mapping):
            raise _wrong_models_error(f"kwargs is a {type(kwargs).__name__}", "examples by name: kwargs={'scale': x}")
        if args is not None:
            raise _wrong_models_error(
                "args= is for several models: {'f': model}", "examples of one model are positional"
            )
        models = _fetched(model, examples, kwargs, sizes)
        return models[()] if () in models else _joined_models(_named_buckets("main", models))
    if examples:
        raise _wrong_models_error(
            f"several models have their examples in args=; found {len(examples)} more", "args={'f': (x,)}"
        )
    _check_model_names(model, {} if args is None else args, kwargs)
    examples_of = args or {}
    raws: dict[str, RawModel] = {}
    for name, one in model.items():
        models = _fetched(one, examples_of.get(name, ()), kwargs.get(name, {}), sizes)
        raws |= {name: models[()]} if () in models else _named_buckets(name, models)
    return _joined_models(raws)


def _fetched(
    model: object, examples: Sequence[Any], kwargs: Mapping[str, Any], sizes: Mapping[str, Sequence[int]]
) -> Mapping[Buckets, RawModel]:
    """Return a model by its sizes, which only a sharded model with symbolic dims has."""
    if is_read(model):
        raw = fetch_whole(model, examples, kwargs)
        if "shapes" not in raw.metadata:
            return {(): fetch(raw)}
        model, examples, kwargs = raw, (), {}
    from aotc.frontend.partition.buckets import fetch_buckets  # only for programs of JAX, which it imports

    with guard("while reading the model", Options()):
        return fetch_buckets(model, examples, kwargs, sizes)


def _named_buckets(name: str, models: Mapping[Buckets, RawModel]) -> dict[str, RawModel]:
    """Return the models of a function's buckets by function name and sizes: ``main_b8``."""
    raws = {}
    for sizes, raw in models.items():
        own = "_".join([name, *(f"{symbol}{size}" for symbol, size in sizes)])
        raws[own] = replace(raw, metadata={**raw.metadata, "bucket": {"function": name, "sizes": dict(sizes)}})
    return raws


def _joined_models(raws: Mapping[str, RawModel]) -> RawModel:
    with guard("while joining the models", Options()):
        return _merged_models(raws)


def _check_model_names(models: Mapping[Any, Any], args: Any, kwargs: Mapping[str, Any]) -> None:
    """Reject model names that are not identifiers, and examples for unknown names."""
    if not models or not all(isinstance(name, str) and name.isidentifier() for name in models):
        raise _wrong_models_error(
            f"the functions are called {list(models)}", "identifiers: {'prefill': f, 'decode': g}"
        )
    for what, examples, kind in (("args", args, list | tuple), ("kwargs", kwargs, Mapping)):
        if not isinstance(examples, Mapping) or not all(isinstance(value, kind) for value in examples.values()):
            form = "{'f': (x, y)}" if what == "args" else "{'f': {'scale': x}}"
            raise _wrong_models_error(f"{what} of several models are not examples by name", form)
        unknown = [name for name in examples if name not in models]
        if unknown:
            raise _wrong_models_error(
                f"{what} has {unknown[0]!r}, which is not a function", f"one of {', '.join(models)}"
            )


def _merged_models(raws: Mapping[str, RawModel]) -> RawModel:
    """Merge fetched models into one module, with the metadata of each under ``entries``."""
    platforms = {tuple(raw.metadata.get("platforms", ())) or ("cpu",) for raw in raws.values()}
    if len(platforms) > 1 or len(next(iter(platforms))) > 1:
        raise _wrong_models_error(
            "models for several platforms cannot be joined", "export each for one: platforms=['cpu']"
        )
    with_calls = [name for name, raw in raws.items() if raw.metadata.get("callbacks")]
    if len(with_calls) > 1:
        what = f"{' and '.join(with_calls)} call back into Python; only one of several models may"
        raise _wrong_models_error(what, "compile them separately")
    with make_context():
        whole = ir.Module.create(ir.Location.unknown())
        table = ir.SymbolTable(whole.operation)
        for name, raw in raws.items():
            _append_model(whole, table, name, raw, raws)
        written = module_bytes(whole)
    entries = {name: {k: v for k, v in raw.metadata.items() if k not in _OF_ALL} for name, raw in raws.items()}
    callbacks = [call for name in with_calls for call in raws[name].metadata["callbacks"]]
    metadata = {"entries": entries, "platforms": list(next(iter(platforms))), "callbacks": callbacks}
    values = {name: leaves for name, raw in raws.items() for leaves in raw.values.values()}
    path = ", ".join(dict.fromkeys(raw.path for raw in raws.values() if raw.path))
    return RawModel(written, path, metadata, values)


def _append_model(
    whole: ir.Module, table: ir.SymbolTable, name: str, raw: RawModel, names: Mapping[str, RawModel]
) -> None:
    """Append the functions of a model to the merged module, its public one as ``name``."""
    module = _parsed_model(replace(raw, path=raw.path or name_of_model_text(name)))
    own = ir.SymbolTable(module.operation)
    public = [op for op in module.body.operations if _is_public(op.operation)]
    if len(public) != 1:
        listed = ", ".join(op.operation.attributes[_SYMBOL].value for op in public) or "none"
        what = f"model {name!r} must have one public function to be joined with others; found {listed}"
        raise CompileError.at(Loc(raw.path), what, hint="compile it separately")
    for key, value in module.operation.attributes.items():
        if key not in whole.operation.attributes and key != _SYMBOL:
            whole.operation.attributes[key] = value
    symbols = [op.operation.attributes[_SYMBOL].value for op in module.body.operations if _is_symbol(op)]
    entry = public[0].operation.attributes[_SYMBOL].value
    order = sorted(symbols, key=lambda old: old == entry)  # rename private ones in conflict with the public one
    for old in order:
        new = name if old == entry else old
        while old != entry and (new in table or new in names or (new != old and new in symbols)):
            new = f"{name}_{new}"
        if new != old:
            own.set_symbol_name(own[old], new)
            for user in module.body.operations:
                own.replace_all_symbol_uses(old, new, user.operation)
    for op in list(module.body.operations):
        whole.body.append(op)
        if _is_symbol(op):
            table.insert(op.operation)


def _is_symbol(op: Any) -> bool:
    return _SYMBOL in op.operation.attributes


def _parsed_model(raw: RawModel) -> ir.Module:
    """Parse a fetched model in the current MLIR context.

    Raises
    ------
    CompileError
        If the model cannot be read.
    """
    try:
        module = parse_model(raw.code)
        upgrade_module(module)
        name_file(module, raw.path)
    except (ir.MLIRError, ValueError):
        read_source(raw, legalize=False)
        raise
    return module


def _is_public(op: Any) -> bool:
    return op.name == "func.func" and not is_private(op)


def _wrong_models_error(message: str, hint: str) -> CompileError:
    return CompileError.at(Loc(), message, hint=hint)
