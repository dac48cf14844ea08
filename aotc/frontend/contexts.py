"""MLIR contexts with JAX's dialects, from jaxlib alone: importing JAX takes longer than many a compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo
from jaxlib.mlir.passmanager import PassManager

try:
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
except ImportError:  # the name depends on the version
    _jax_mlir_ext = None  # type: ignore[assignment]

stablehlo.register_stablehlo_passes()


class _BareContext(ir.Context):
    """An MLIR context that does not load every dialect linked to the bindings, as the base class would."""

    def __init__(self) -> None:
        super(ir.Context, self).__init__()


@cache
def _mlir_thread_pool() -> ir.ThreadPool:
    """Return the thread pool that all contexts share."""
    return ir.ThreadPool()


def make_context() -> ir.Context:
    """Return an MLIR context with all dialects that JAX registers; unknown attributes are allowed."""
    try:
        context = _dialects_of_jaxlib()
    except AttributeError:  # as above
        context = _context_of_jax()
    context.allow_unregistered_dialects = True
    with context:  # the bindings load dialects only when a pass needs them; this one needs the dialect of !quant types
        PassManager.parse("builtin.module(vhlo-legalize-to-stablehlo)").run(ir.Module.parse("module {}").operation)
    return context


_IDLE: list[tuple[ir.Context, int]] = []
"""Contexts for reuse, with the number of their uses."""


# Bytes of a model's text or bytecode up to which it is read in a reused MLIR context. A context keeps the constants of
# its models alive, and for larger models the 2 ms to create a new one are a small part of the time. With CONTEXT_USES
# at most 16 MB stay alive, and only if the models are mostly constants.
CONTEXT_MODEL = 1 << 18
# Reuses of a context after its first model; it keeps the constants and types of all of its models.
CONTEXT_USES = 64


@contextmanager
def mlir_context_for(size: int) -> Iterator[ir.Context]:
    """Yield a context for a model of ``size`` bytes, reused from another small model if possible.

    Creating one takes longer than reading a small model. A context keeps all constants and types of its models, so it
    is reused only for small models, a limited number of times, and never after an error.
    """
    if size > CONTEXT_MODEL:
        yield make_context()
        return
    try:
        context, uses = _IDLE.pop()
    except IndexError:
        context, uses = make_context(), 0
    yield context
    if uses < CONTEXT_USES:
        _IDLE.append((context, uses + 1))


def _dialects_of_jaxlib() -> ir.Context:
    """Return a context with all dialects that jaxlib has, and the shared thread pool."""
    context = _BareContext()
    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    context.set_thread_pool(_mlir_thread_pool())
    for dialect in (sdy, mpmd, chlo, stablehlo):
        dialect.register_dialect(context)
    mhlo.register_mhlo_dialect(context)
    return context


def _context_of_jax() -> ir.Context:
    from jax._src.interpreters import mlir

    return mlir.make_ir_context()
