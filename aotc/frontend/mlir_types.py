"""Convert MLIR types and attributes to plain Python values: dtypes, sizes, tuples of leaves, integers."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aotc.diagnostics import UNKNOWN, CompileError, Loc
from aotc.ir.dims.algebra import Dim
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.limits import MOST_BYTES, MOST_RANK

_DTYPE_NAMES = {
    **{name: name for name in DTYPES},
    **{f"ui{bits}": f"u{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    "complex<f32>": "c64", "complex<f64>": "c128", "index": "i64",
}  # fmt: skip

DYNAMIC = ir.ShapedType.get_dynamic_size()

_OF_SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "!shape.shape": ("i64", (DYNAMIC,)),
    "!shape.size": ("i64", ()),
}
"""Types of MLIR's shape dialect, and the tensors that represent them."""
MOST_NUMBERS = 1 << 20  # of a splat attribute that is listed: a pair for each of half a million processes
_WITHOUT_VALUE = frozenset({"!mhlo.token", "!shape.witness"})


def module_bytes(module: ir.Module) -> bytes:
    """Return ``module`` as bytecode that this jaxlib reads."""
    written = BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


def is_private(function: ir.OpView | ir.Operation) -> bool:
    """Return True if a function is visible in its module alone."""
    visibility = function.operation.attributes.get("sym_visibility")
    return visibility is not None and visibility.value == "private"


def inner_operations(op: Any) -> list[Any]:
    """Return the ops directly in the regions of ``op``, in their order."""
    return [view.operation for region in op.regions for block in region.blocks for view in block.operations]


# Tensors of a tuple, at most: each is an argument, a result or a value of the program. 100,000 take 20 s to compile.
MOST_LEAVES = 1 << 16
# Depth of nested tuples, at most: trees of arguments are walked recursively.
MOST_NESTED_TUPLES = 100


def leaf_types(t: ir.Type, loc: Loc = UNKNOWN) -> tuple[ir.Type, ...]:
    """Return the tensor types of a value of type ``t``, which may be a tuple.

    Tuples and futures are flattened. Tokens are dropped: they only order effects, and ops with visible effects are
    rejected. Witnesses are dropped, too: the op that creates one checks its constraint.

    Raises
    ------
    CompileError
        At ``loc`` if ``t`` has too many tensors, or too many levels of tuples.
    """
    if isinstance(t, (ir.RankedTensorType, ir.MemRefType)):
        return (t,)
    leaves: list[ir.Type] = []
    waiting = [(t, 0)]  # a stack: MLIR shares equal tuples, so that few types may have many leaves at any depth
    for _ in range(4 * MOST_LEAVES):
        if not waiting:
            return tuple(leaves)
        inner, depth = waiting.pop()
        if isinstance(inner, ir.TupleType):
            parts = [inner.get_type(n) for n in range(inner.num_types)]
        elif stablehlo.FutureType.isinstance(inner):
            parts = list(stablehlo.FutureType(inner).types)
        else:
            leaves += () if is_token(inner) else (inner,)
            continue
        if depth == MOST_NESTED_TUPLES:
            message = f"a tuple is nested more than {MOST_NESTED_TUPLES} deep"
            raise CompileError.at(loc, message, hint="flatten it: one tuple of all tensors")
        waiting += [(part, depth + 1) for part in reversed(parts)]
        if len(waiting) + len(leaves) > MOST_LEAVES:
            break
    message = f"a tuple has more than {MOST_LEAVES:,} tensors"
    raise CompileError.at(loc, message, hint="stack tensors of the same shape")


def is_token(t: ir.Type) -> bool:
    """Return True if ``t`` is a token: it only orders effects and has no value at run time."""
    return stablehlo.TokenType.isinstance(t) or str(t) in _WITHOUT_VALUE


def dtype_text(t: ir.Type) -> str:
    """Return the dtype of a tensor type in aotc's notation, or MLIR's text if it has none."""
    element = str(getattr(t, "element_type", t))
    return _DTYPE_NAMES.get(element, element)


def dtype_and_sizes(t: ir.Type, path: str) -> tuple[str, tuple[int, ...]]:
    """Return the dtype name and the sizes (``DYNAMIC`` if unknown) of a tensor or scalar type.

    ``path`` is the file, for the error of an unsupported type.
    """
    if str(t) in _OF_SHAPES:
        return _OF_SHAPES[str(t)]
    is_scalar = isinstance(t, ir.IndexType | ir.IntegerType | ir.FloatType | ir.ComplexType)
    if not is_scalar and not isinstance(t, ir.RankedTensorType | ir.MemRefType):
        raise CompileError.at(Loc(path), f"type {t} is not supported", hint="ranked tensors of numbers only")
    name = str(t if is_scalar else t.element_type)
    if name not in _DTYPE_NAMES:
        raise CompileError.at(Loc(path), f"element type {name} is not supported")
    if isinstance(getattr(t, "encoding", None), ir.OpaqueAttr):
        message = f"type {t} has an encoding of a dialect that is not registered"
        raise CompileError.at(Loc(path), message, hint="remove the encoding if it only states a layout")
    dtype, shape = _DTYPE_NAMES[name], () if is_scalar else tuple(t.shape)
    check_size(dtype, [1 if n == DYNAMIC else n for n in shape], Loc(path))
    return dtype, shape


def check_size(dtype: str, shape: Sequence[Dim], loc: Loc) -> None:
    """Reject a type of more dims than arrays have, or of more bytes than there are addresses.

    Symbolic dims are not checked. A dim of 0 counts as 1: strides are products of the other dims.

    Raises
    ------
    CompileError
        At ``loc``.
    """
    if len(shape) > MOST_RANK:
        message = f"a tensor of {len(shape)} dimensions is not supported"
        raise CompileError.at(loc, message, hint=f"at most {MOST_RANK}: arrays of NumPy have no more")
    size = to_numpy(dtype).itemsize * prod(max(n, 1) for n in shape if isinstance(n, int))
    if size > MOST_BYTES:
        text = f"tensor<{'x'.join(map(str, shape))}x{dtype}>"
        message = f"{text} has {size:,} bytes, more than a machine can address"
        raise CompileError.at(loc, message, hint=f"at most {MOST_BYTES:,}")


def stablehlo_bounds(t: ir.Type) -> tuple[int, ...]:
    """Return the ``#stablehlo.bounds`` of a type for each dim; ``DYNAMIC`` means no bound."""
    encoding = t.encoding if isinstance(t, ir.RankedTensorType) else None
    if encoding is None or not stablehlo.TypeExtensions.isinstance(encoding):
        return ()
    return tuple(stablehlo.TypeExtensions(encoding).bounds)


def array_numbers(attribute: ir.DenseElementsAttr) -> np.ndarray:
    """Return the numbers of a small array attribute, such as groups or paddings.

    Raises
    ------
    CompileError
        If there are too many: a splat of a few bytes of text could fill the memory.
    """
    shape = tuple(ir.ShapedType(attribute.type).shape)
    if prod(shape) > MOST_NUMBERS:
        message = f"an attribute is {prod(shape):,} times one number, expected at most {MOST_NUMBERS:,} numbers"
        raise CompileError.at(Loc(), message, hint="arrays of such sizes are constants of the program")
    return np.array(attribute).reshape(shape)


def integer_tuple(attribute: Any) -> tuple[int, ...]:
    """Return an integer array attribute as a tuple."""
    if isinstance(attribute, ir.DenseElementsAttr):
        return tuple(int(x) for x in array_numbers(attribute).reshape(-1))
    return tuple(int(x) for x in attribute)


def integer_attribute_tuple(op: Any, name: str, default: Sequence[int]) -> tuple[int, ...]:
    """Return the integer array attribute ``name`` of an op, or ``default``."""
    return integer_tuple(op.attributes[name]) if name in op.attributes else tuple(default)


def config_of(op: Any) -> Any:
    """Return the configuration of a custom call: a dictionary, the text of a call before the FFI, or None."""
    return next((op.attributes[n] for n in ("mhlo.backend_config", "backend_config") if n in op.attributes), None)


def dictionary_entries(attribute: Any) -> dict[str, Any]:
    """Return the entries of a dictionary attribute by name; an empty dict for other attributes."""
    named = [attribute[i] for i in range(len(attribute))] if isinstance(attribute, ir.DictAttr) else []
    return {a.name: a.attr for a in named}


def discardable_integer(attributes: Any, name: str, default: int, loc: Loc) -> int:
    """Return the discardable attribute ``name`` as an integer, or ``default`` if it is missing.

    Raises
    ------
    CompileError
        If the attribute is not an integer, which MLIR does not verify for discardable attributes.
    """
    if name not in attributes:
        return default
    if isinstance(attribute := attributes[name], ir.IntegerAttr):
        return int(attribute.value)
    raise CompileError.at(loc, f"{name} is {attribute}, expected an integer", hint=f"{name} = {default} : i32")


def attribute_value(op: Any, name: str, default: Any) -> Any:
    """Return the Python value of a simple attribute, or ``default``."""
    return op.attributes[name].value if name in op.attributes else default
