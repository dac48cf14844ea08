"""A parsed model as a portable artifact, which later versions of StableHLO can read, and as text."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.contexts import make_context
from aotc.frontend.hidden_ops import hide_ops, operations_of, reveal_hidden_ops
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.mlir import RawModel, upgrade_module
from aotc.frontend.mlir_types import module_bytes
from aotc.source.bytecode import is_portable


def artifact_of(raw: RawModel, module: ir.Module) -> bytes:
    """Serialize ``module``, parsed from ``raw``, as a portable artifact; return ``raw`` if it is an artifact already.

    The artifact contains names, locations, attributes and ops of dialects without a portable form. CHLO ops become
    custom calls. If this jaxlib cannot serialize a CHLO op portably, the result is plain bytecode.
    """
    if is_portable(raw.data):
        return raw.data  # type: ignore[return-value]
    try:
        with module.context.attach_diagnostic_handler(lambda _: True):  # ops without a portable form are not an error
            return stablehlo.serialize_portable_artifact(
                _serializable_copy(module), stablehlo.get_current_version(), True
            )
    except ValueError:
        return module_bytes(module)


def _serializable_copy(module: ir.Module) -> ir.Module:
    """Return a copy of ``module`` in which custom calls replace CHLO ops; constants share their elements.

    Serialization modifies its module, so it needs a copy.
    """
    with module.context:
        copied = ir.Module.create(module.operation.location)
    for name, value in module.operation.attributes.items():
        copied.operation.attributes[name] = value
    for op in module.body.operations:
        copied.body.append(op.operation.clone())
    hide_ops(copied)
    return copied


# Elements of a constant up to which aotc dump --source prints them; weights would fill screens.
SHOWN_ELEMENTS = 16


class NumberedModel(NamedTuple):
    """A model whose ops have their lines of the printed text as additional locations.

    ``text`` has the printed lines, ``places`` the user's source line for each of them, ``raw`` the model.
    """

    text: list[str]
    places: list[str]
    raw: RawModel


def numbered_model(raw: RawModel) -> NumberedModel:
    """Print a model, and add to each op's location the number of its line in that text, from 1.

    The text omits large constants. Locations are unchanged where jaxlib cannot modify them (before 0.8).

    Raises
    ------
    CompileError
        If the model cannot be read.
    """
    with make_context():
        module = _module_as_shown(raw)
        text = module.operation.get_asm(large_elements_limit=SHOWN_ELEMENTS)
        lines = text.splitlines()
        places = [""] * len(lines)
        try:
            printed = ir.Module.parse(text)
        except ir.MLIRError:  # an op of another dialect whose text does not read back
            return NumberedModel(lines, places, raw)
        for op, same in zip(list(operations_of(module)), list(operations_of(printed)), strict=True):
            loc, at = loc_from_mlir(op.location, ""), same.location
            places[loc_from_mlir(at, "").line - 1] = loc.source or loc.name
            if getattr(ir.Operation.location, "fset", None) is not None:
                op.location = ir.Location.fused([op.location, at])
        return NumberedModel(lines, places, replace(raw, data=module_bytes(module), rewritten=b""))


def _module_as_shown(raw: RawModel) -> ir.Module:
    """Parse a model to StableHLO, with hidden ops instead of the custom calls that replace them."""
    try:
        module = ir.Module.parse(raw.code)
        upgrade_module(module)
        reveal_hidden_ops(module)
    except (ir.MLIRError, ValueError) as error:
        raise CompileError.at(Loc(raw.path), f"the model cannot be read: {error}") from None
    return module


def shortened_mlir_text(raw: RawModel) -> str:
    """Return the text of a model without large constants and locations.

    Raises
    ------
    CompileError
        If the model cannot be read.
    """
    with make_context():
        return _module_as_shown(raw).operation.get_asm(large_elements_limit=SHOWN_ELEMENTS)

