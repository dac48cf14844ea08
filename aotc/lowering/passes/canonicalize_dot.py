"""Bring every ``dot_general`` into one form: a ``matmul`` of [B, M, K] and [B, K, N].

Dims of one role are made adjacent by a transpose and merged by a reshape. A transpose that only swaps M and K, or K and
N, becomes a flag of the ``matmul``.

A matmul whose sums have one term each, such as an outer product, becomes a multiplication, which the kernel that reads
the result can compute. A matmul with a part of the identity matrix becomes a selection
(:mod:`~aotc.lowering.passes.canonicalize.one_hot_products`).

A large matmul on a CPU whose only reader transposes it, as in gradients of weights, gets its operands swapped: tiles
then write rows of the transposed result, not columns, whose elements are in different cache lines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aotc.ir.dims.algebra import product
from aotc.ir.dims.compare import is_provable_relation
from aotc.ir.tensor.ir import Module, Op, Region, TensorType, Value, use_counts, walk
from aotc.lowering.passes.canonicalize.one_hot_products import selection_for_one_hot_product
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.thresholds import STRIDED_BYTES
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def canonicalize_dot(module: Module, options: Options) -> Module:
    """Return ``module`` with every ``dot_general`` as a ``matmul``, a multiplication or a selection."""
    home, _ = op_targets(module, options)
    functions = {}
    for name, f in module.functions.items():
        permutation = _transposed_readers(f.body) if options.opt_level >= 2 else {}
        functions[name] = rewrite_function(f, partial(_canonicalize_dot_rule, home, permutation), ("dot_general",))
    return module.with_functions(functions)


def _transposed_readers(body: Region) -> dict[Value, tuple[int, ...]]:
    """Return the permutation of the transpose that is the only reader, for each matmul that has such a reader."""
    if "dot_general" not in body.names or "transpose" not in body.names:
        return {}
    counts, products = use_counts(body), {v for op in walk(body) if op.name == "dot_general" for v in op.results}
    perms = {op.operands[0]: tuple(op.attrs["perm"]) for op in walk(body) if op.name == "transpose"}
    return {v: perm for v, perm in perms.items() if v in products and counts[v] == 1}


def _canonicalize_dot_rule(
    home: Callable[[Op], Target], permutation: Mapping[Value, tuple[int, ...]], op: Op, b: Builder
) -> Sequence[Value] | None:
    """Return the selection, multiplication or ``matmul`` that replaces a ``dot_general``; None for other ops.

    ``permutation`` has the transpose that is the only reader of a result; ``home`` returns an op's target.
    """
    if op.name != "dot_general":
        return None
    value = selection_for_one_hot_product(op, b)
    if value is not None:
        return (value,)
    lhs, rhs = op.operands
    pairs = list(zip(op.attrs["lhs_contract"], op.attrs["rhs_contract"]))
    if all(lhs.type.shape[d] == 1 for d, _ in pairs) and {lhs.type.dtype, rhs.type.dtype} == {op.result.type.dtype}:
        return (_dot_as_multiplication(op, b),)
    back = _swapped_dims(op)
    is_packed = b.is_precomputable(rhs) and not b.is_precomputable(lhs)
    large = not STRIDED_BYTES.holds(product(op.result.type.shape) * size_of(op.result.type.dtype))
    columns = op.result in permutation and _writes_columns(op.result.type, permutation[op.result], back)
    if large and columns and not is_packed and home(op).kind == "cpu":
        return (
            b.transpose(_dot_as_matmul(_with_swapped_operands(op, back), b), [back.index(d) for d in range(len(back))]),
        )
    return (_dot_as_matmul(op, b),)


def _writes_columns(type_: TensorType, perm: tuple[int, ...], back: tuple[int, ...]) -> bool:
    """Return True if tiles of a matmul transposed by ``perm`` would write columns; ``back`` swaps its operands.

    Rows of the result need not be adjacent: ``th,ehm->etm``, each row by its expert, is first a matmul (e, m, t).
    """
    if perm == back:
        return True
    places = [d for d, size in enumerate(type_.shape) if size != 1]
    read, other = ([d for d in order if d in places][-1:] for order in (perm, back))
    return read == other != places[-1:] and is_provable_relation("ge", *(type_.shape[d] for d in (*read, places[-1])))


def _swapped_dims(op: Op) -> tuple[int, ...]:
    """Return the dims of a product in their order after its operands are swapped."""
    batch, rank = len(op.attrs["lhs_batch"]), op.result.type.rank
    first = batch + len(
        _free_dims_of_operand(op.operands[0], *(tuple(op.attrs[f"lhs_{role}"]) for role in ("batch", "contract")))
    )
    return (*range(batch), *range(first, rank), *range(batch, first))


def _with_swapped_operands(op: Op, dims: Sequence[int]) -> Op:
    """Return a product with its operands swapped; its dims are the dims ``dims`` of the original."""
    roles = {f"{side}_{role}": op.attrs[f"{other}_{role}"]
             for side, other in (("lhs", "rhs"), ("rhs", "lhs")) for role in ("batch", "contract")}  # fmt: skip
    type_ = replace(op.result.type, shape=tuple(op.result.type.shape[d] for d in dims))
    result = replace(op.result, type=type_)
    return replace(op, operands=op.operands[::-1], results=(result,), attrs={**op.attrs, **roles})


def _dot_as_matmul(op: Op, b: Builder) -> Value:
    """Return the result of a ``dot_general`` by a ``matmul``, with the dim order of fewest transposes."""
    lhs, rhs = op.operands
    pairs = list(zip(op.attrs["lhs_contract"], op.attrs["rhs_contract"]))
    lb, rb = tuple(op.attrs["lhs_batch"]), tuple(op.attrs["rhs_batch"])
    orders = [pairs, sorted(pairs), sorted(pairs, key=lambda p: p[1])]

    def transpose_count(order: list[tuple[int, int]]) -> int:
        lc, rc = tuple(p[0] for p in order), tuple(p[1] for p in order)
        return _needs_transpose(lhs, lb, lc) + _needs_transpose(rhs, rb, rc)

    best = min(orders, key=transpose_count)
    lc, rc = tuple(p[0] for p in best), tuple(p[1] for p in best)
    rows, left, lhs_transposed = _operand_as_matrix(lhs, lb, lc, True, b)
    columns, right, rhs_transposed = _operand_as_matrix(rhs, rb, rc, False, b)
    batch = (product(lhs.type.shape[d] for d in lb),) if lb else ()
    shape = (*batch, product(lhs.type.shape[d] for d in rows), product(rhs.type.shape[d] for d in columns))
    attrs = {"lhs_transposed": lhs_transposed, "rhs_transposed": rhs_transposed}
    if op.attrs["precision"] not in (None, "DEFAULT"):  # DEFAULT rounds f32 where nothing else is fast
        attrs["precision"] = op.attrs["precision"]
    result = b.make("matmul", (left, right), attrs, TensorType(op.result.type.dtype, shape))
    return b.reshape(result, op.result.type.shape)


def _dot_as_multiplication(op: Op, b: Builder) -> Value:
    """Return a matmul with contraction length 1 as a broadcast multiplication."""
    shape, batch = op.result.type.shape, len(op.attrs["lhs_batch"])
    factors = []
    for x, side in zip(op.operands, ("lhs", "rhs")):
        own, contract = tuple(op.attrs[f"{side}_batch"]), tuple(op.attrs[f"{side}_contract"])
        free = _free_dims_of_operand(x, own, contract)
        begin = batch if side == "lhs" else len(shape) - len(free)
        place = {d: n for n, d in enumerate(own)} | {d: begin + n for n, d in enumerate(free)}
        dims = sorted(place)
        factors.append(b.broadcast(b.reshape(x, [x.type.shape[d] for d in dims]), [place[d] for d in dims], shape))
    return b.make("mul", factors)


def _free_dims_of_operand(x: Value, batch: tuple[int, ...], contract: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(d for d in range(x.type.rank) if d not in batch and d not in contract)


def _is_reshape_permutation(x: Value, dims: Sequence[int]) -> bool:
    """Return True if the permutation ``dims`` of ``x`` is a reshape: only dims of size 1 move."""
    large = [d for d in dims if x.type.shape[d] != 1]
    return large == sorted(large)


def _needs_transpose(x: Value, batch: tuple[int, ...], contract: tuple[int, ...]) -> bool:
    """Return True if no reshape brings the dims into an order that a matmul reads.

    These orders are batch, free and contracted dims, or batch, contracted and free dims.
    """
    free = _free_dims_of_operand(x, batch, contract)
    return not (
        _is_reshape_permutation(x, (*batch, *free, *contract)) or _is_reshape_permutation(x, (*batch, *contract, *free))
    )


def _keeps_last_dim(x: Value, batch: tuple[int, ...], parts: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Return True if the order ``(batch, *parts)`` needs no transpose, or one in which the last dim stays last."""
    order = (*batch, *parts[0], *parts[1])
    large = [d for d in order if x.type.shape[d] != 1]
    return _is_reshape_permutation(x, order) or large[-1] == max(large)


def _operand_as_matrix(
    x: Value, batch: tuple[int, ...], contract: tuple[int, ...], is_lhs: bool, b: Builder
) -> tuple[tuple[int, ...], Value, bool]:
    """Return the free dims of a dot operand, the operand as a (batched) matrix, and whether it is transposed."""
    free = _free_dims_of_operand(x, batch, contract)
    plain, swapped = ((free, contract), (contract, free)) if is_lhs else ((contract, free), (free, contract))
    transposed = not _is_reshape_permutation(x, (*batch, *plain[0], *plain[1])) and _keeps_last_dim(x, batch, swapped)
    first, second = swapped if transposed else plain
    order = (*batch, *first, *second)
    shape = x.type.shape
    sizes = [product(shape[d] for d in part) for part in ((batch, first, second) if batch else (first, second))]
    source = x if _is_reshape_permutation(x, order) else b.transpose(x, order)
    return free, b.reshape(source, sizes), transposed
