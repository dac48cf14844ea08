"""A parsed model as a portable artifact, which later versions of StableHLO can read, and as text."""

from __future__ import annotations

from io import BytesIO

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.contexts import make_context
from aotc.frontend.hidden_ops import hide_ops, show_ops
from aotc.frontend.mlir import Raw, upgrade_module
from aotc.source.bytecode import is_portable


def artifact_of(raw: Raw, module: ir.Module) -> bytes:
    """Return ``module``, parsed from ``raw``, as a portable artifact; ``raw`` itself if it is one.

    The artifact contains names, locations, attributes and ops of dialects without a portable form. CHLO ops become
    custom calls. If this jaxlib cannot serialize a CHLO op portably, the result is plain bytecode.
    """
    if is_portable(raw.data):
        return raw.data  # type: ignore[return-value]
    try:
        with module.context.attach_diagnostic_handler(lambda _: True):  # ops without a portable form are not an error
            return stablehlo.serialize_portable_artifact(_copy(module), stablehlo.get_current_version(), True)
    except ValueError:
        return module_bytes(module)


def module_bytes(module: ir.Module) -> bytes:
    """Return ``module`` as bytecode that this jaxlib reads."""
    written = BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def _copy(module: ir.Module) -> ir.Module:
    """Return a copy for serialization, which modifies it; CHLO ops become calls. Constants share their elements."""
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


def text_of(raw: Raw, locations: bool = False) -> str:
    """Return the text of a model without large constants, with ``locations`` on request.

    Raises
    ------
    CompileError
        If it cannot be read.
    """
    with make_context():
        try:
            module = ir.Module.parse(raw.code)
            upgrade_module(module)
            show_ops(module)
        except (ir.MLIRError, ValueError) as error:
            raise CompileError.at(Loc(raw.path), f"the model cannot be read: {error}") from None
        return module.operation.get_asm(large_elements_limit=SHOWN_ELEMENTS, enable_debug_info=locations)

