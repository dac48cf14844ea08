"""Import of ``einsum`` and ``unary_einsum``: diagonals, sums, a matmul, a transpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.session import Importer, ImportState
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import to_numpy

Labels = list[str]
_Labelled = tuple[Value, Labels]


def _einsum_labels(state: ImportState, text: str, rank: int) -> Labels:
    """Return a label for each dim from the subscript ``text``; dims of ``...`` are numbered from the right."""
    text = text.replace(" ", "")
    head, dots, tail = text.partition("...")
    count = rank - len(head) - len(tail) if dots else 0
    if count < 0 or not all(c.isalpha() for c in head + tail) or (not dots and len(head) != rank):
        state.fail(f"einsum: {text!r} does not describe a tensor of {rank} dims")
    return [*head, *(f"...{k}" for k in range(count, 0, -1)), *tail]


def _einsum_diagonal(state: ImportState, x: Value, labels: Labels) -> _Labelled:
    """Return the diagonal of ``x`` over dims with the same label: other elements are masked, and the dim is summed."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            first, second = [d for d, name in enumerate(labels) if name == label][:2]
            places = [
                state.one("iota", (), {"dim": d}, [TensorType("i64", x.type.shape)]) for d in (first, second)
            ]
            zero = state.constant(np.zeros((), to_numpy(x.type.dtype)), x.type)
            x = sum_over(state, state.one("select", [state.one("eq", places), x, zero]), (second,))
            labels = labels[:second] + labels[second + 1 :]
    return x, labels


def _einsum_sum_out(state: ImportState, x: Value, labels: Labels, remaining: set[str]) -> _Labelled:
    """Sum ``x`` over the dims whose labels are not in ``remaining``; return it with the remaining labels."""
    dims = tuple(d for d, label in enumerate(labels) if label not in remaining)
    return (sum_over(state, x, dims) if dims else x), [label for label in labels if label in remaining]


def _einsum_product(state: ImportState, lhs: _Labelled, rhs: _Labelled, output: Labels, dtype: str) -> _Labelled:
    """Multiply two labelled operands, and return the product with its labels.

    A label of both operands is a batch dim if it is in ``output``, and a contracted dim otherwise.
    """
    (a, left), (b, right) = lhs, rhs
    shared = [label for label in left if label in right]
    batch, contract = ([n for n in shared if (n in output) == is_batch] for is_batch in (True, False))
    attrs = {
        "lhs_batch": tuple(map(left.index, batch)), "rhs_batch": tuple(map(right.index, batch)),
        "lhs_contract": tuple(map(left.index, contract)), "rhs_contract": tuple(map(right.index, contract)),
        "precision": "DEFAULT",
    }  # fmt: skip
    free = [n for n in left if n not in shared] + [n for n in right if n not in shared]
    return state.one("dot_general", [a, b], attrs, [TensorType(dtype)]), batch + free


def _import_einsum(state: ImportState, op: Any) -> None:
    """Import ``einsum``: diagonals and sums of each operand, a matmul of both, and a transpose."""
    operands = state.operands(op)
    config = op.attributes["einsum_config"].value
    inputs, arrow, output = config.partition("->")
    texts = inputs.split(",")
    if not arrow or len(texts) != len(operands):
        state.fail(f"einsum: {config!r} does not describe {len(operands)} operands and a result")
    parts = [_einsum_diagonal(state, v, _einsum_labels(state, text, v.type.rank)) for v, text in zip(operands, texts)]
    order = _einsum_labels(state, output, len(state.session.parts(op.results[0].type)[1]))
    operand_labels = {label for _, labels in parts for label in labels}
    if len(set(order)) != len(order) or not set(order) <= operand_labels:
        state.fail(f"einsum: each label of the result of {config!r} must occur once there, and in an operand")
    others = [{*order, *(n for other in parts if other is not part for n in other[1])} for part in parts]
    parts = [_einsum_sum_out(state, *part, remaining) for part, remaining in zip(parts, others)]
    dtype = state.dtype(op.results[0].type)
    summed, labels = parts[0] if len(parts) == 1 else _einsum_product(state, parts[0], parts[1], order, dtype)
    perm = tuple(map(labels.index, order))
    summed = summed if perm == tuple(range(len(perm))) else state.one("transpose", [summed], {"perm": perm})
    state.bind(op, [state.convert(summed, dtype)])


LINALG_EINSUM: dict[str, Importer] = {"stablehlo.einsum": _import_einsum, "stablehlo.unary_einsum": _import_einsum}
