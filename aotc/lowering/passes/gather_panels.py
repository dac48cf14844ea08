"""Gather rows of a table from the packed panels of a matmul with the same table, so that the table is stored once.

An embedding table is often also the matrix of the output layer.

Before::

    %5 = gather %table, %ids : f32[4, 256]              // %table: constant f32[1000, 256]
After::

    %4 = gather %panels, %places : f32[4, 256, 1]       // %panels: the product's constant f32[32, 256, 32]
    %5 = reshape %4 : f32[4, 256]

A row of the table is a column of the matmul's right operand; its elements are one panel width apart in the panels. If
the weights are quantised (:mod:`.quantize_weights`)::

    %4 = gather %panels, %places : u8[4, 256]           // %panels: the product's constant u8[16, 1, 16640]
    %5 = mul (convert (bitcast %4)), %scales : f32[4, 256]

The scales are at the beginning of each chunk. A bound table is packed by a program that runs before calls. In this case
the gather gets its own packing ops, which are merged with those of the matmul when they move to that program.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from aotc.ir.dims.algebra import Dim, static
from aotc.ir.loop.forms.quantized import SCALE_BYTES
from aotc.ir.opset import MOVES
from aotc.ir.opset.dim_attributes import dim_of, dims_of
from aotc.ir.tensor.ir import Function, Module, Op, TensorType, Value, walk
from aotc.lowering.analysis.constant_values import constant_of, is_computable_from_weights, weights_of
from aotc.lowering.passes.pack_contractions.pack_contractions import pack_panels
from aotc.lowering.passes.pack_contractions.swap_operands import swap_permutation, swaps_matrix
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.options import Options


def gather_panels(module: Module, options: Options) -> Module:
    """Gather rows of constant tables from the panels of matmuls, if only rows of the tables are read otherwise.

    Gathering a row element by element takes longer than copying it, but far less time than the matmul.
    """
    tables = arrays_only_read_by_rows(module)
    packed = _constant_panels_of(module) if tables else []
    bound = {v: packing for f in module.functions.values() for v, packing in _bound_tables(f).items()}
    if not packed and not bound:
        return module
    home, _ = op_targets(module, options)

    def gather_from_panels_rule(op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the rows that ``op`` gathers, read from panels of the same table, or None."""
        if not gathers_rows(op) or home(op).kind != "cpu":
            return None
        if op.operands[0] in bound:
            return (_gathered_packed_rows(op, *bound[op.operands[0]].append_panels(op.operands[0], b), b),)
        table = constant_of(op.operands[0], b.definitions)
        if table is None or table.ndim != 2 or id(table) not in tables:  # an array filled with one number has no dims
            return None
        packing = next((x for x in packed if x.holds_table(table)), None)
        if packing is None:
            return None
        stored = b.constant(packing.stored, TensorType(op.operands[0].type.dtype, packing.stored.shape))
        return (_gathered_packed_rows(op, stored, packing.group, packing.n, b),)

    return rewrite_module(module, gather_from_panels_rule, ("gather",))


@dataclass(frozen=True, slots=True)
class _PackedMatmulPanels:
    """Packed panels (P, steps, cols * group) of the right operand of a matmul with ``n`` columns."""

    stored: np.ndarray
    group: int
    n: int

    @property
    def cols(self) -> int:
        """Return the number of columns in a packed panel."""
        return int(self.stored.shape[2]) // self.group

    def holds_table(self, table: np.ndarray) -> bool:
        """Return True if the rows of the embedding ``table`` are the columns of the packed matmul operand."""
        count, steps, _ = self.stored.shape
        rows, depth = table.shape
        if self.stored.dtype != table.dtype or self.n != rows or steps != -(-depth // self.group):
            return False
        panels = self.stored.reshape(count, steps, self.cols, self.group)
        bits = f"u{table.dtype.itemsize}"
        for first, panel in zip(range(0, rows, self.cols), panels):
            own = table[first : first + self.cols]
            columns = panel.transpose(1, 0, 2).reshape(self.cols, -1)[: len(own), :depth]
            if not np.array_equal(columns.view(bits), own.view(bits)):
                return False
        return True


def _constant_panels_of(module: Module) -> list[_PackedMatmulPanels]:
    """Return the constant panels of a module's matmuls."""
    ops = [op for f in module.functions.values() for op in walk(f.body)]
    arrays = {op.result: op.attrs["value"] for op in ops if op.name == "constant"}
    products = [op for op in ops if op.name == "packed_matmul" and op.operands[1].type.rank == 3]
    return [
        _PackedMatmulPanels(arrays[op.operands[1]], op.attrs["group"], static(dim_of(op.attrs, "n")))
        for op in products
        if op.operands[1] in arrays and arrays[op.operands[1]].ndim == 3
    ]


@dataclass(frozen=True, slots=True)
class _TablePacking:
    """The packing of a bound table (n, K), or of its transpose, for a matmul."""

    cols: int
    group: int
    n: int
    is_transposed: bool

    def append_panels(self, table: Value, b: Builder) -> tuple[Value, int, int]:
        """Append the ops that pack ``table`` as panels; return the panels, the terms of a step and the row count."""
        rhs = table if self.is_transposed else b.transpose(table, swap_permutation(2))
        return pack_panels(rhs, self.cols, self.group, self.is_transposed, b), self.group, self.n


def _bound_tables(function: Function) -> dict[Value, _TablePacking]:
    """Return the packing of each bound table whose only other readers are gathers of rows."""
    if "weights" not in function.attrs:
        return {}
    definitions = {v: op for op in walk(function.body) for v in op.results}
    computable = set(weights_of(function))
    read = set(function.body.results)
    for op in dict.fromkeys(definitions.values()):
        if is_computable_from_weights(op, computable, definitions):
            computable.update(op.results)
        else:
            read.update(op.operands[1:] if gathers_rows(op) else op.operands)
            read.update(v for inner in op.regions for v in inner.results)
    packings: dict[Value, _TablePacking] = {}
    for op in definitions.values():
        panels = op.operands[1] if op.name == "packed_matmul" else None
        if panels is not None and panels in computable and panels.type.rank == 3:
            packings.update(_table_packing_of(op, definitions))
    return {v: packing for v, packing in packings.items() if v in computable and v not in read}


def _table_packing_of(product: Op, definitions: Mapping[Value, Op]) -> dict[Value, _TablePacking]:
    """Return the table whose rows are the columns of a matmul, with its packing, if :func:`pack_panels` packed it."""
    v, chain = product.operands[1], []
    while v in definitions and (definitions[v].name in MOVES or definitions[v].name == "pad"):
        chain.append(definitions[v])
        v = chain[-1].operands[0]
    chain = [op for op in chain if op.name != "pad"]
    transposed = len(chain) == 3
    n, group = dim_of(product.attrs, "n"), product.attrs["group"]
    if not isinstance(n, int) or (not transposed and not (len(chain) == 4 and swaps_matrix(chain[3]))):
        return {}
    cols = static(product.operands[1].type.shape[2]) // group
    axes = (0, 2, 1, 3) if transposed else (2, 0, 3, 1)
    same = chain[0].name == chain[2].name == "reshape" and tuple(chain[1].attrs.get("perm", ())) == axes
    whole = v.type.rank == 2 and v.type.shape[0] == n
    return {v: _TablePacking(cols, group, n, transposed)} if same and whole else {}


def _gathered_packed_rows(op: Op, stored: Value, group: int, count: int, b: Builder) -> Value:
    """Return the rows of a table that the gather ``op`` selects, read from packed panels; indices are clamped."""
    _, steps, width = map(static, stored.type.shape)
    n, row_shape = _row_integer_builder(op, b)
    ids = n.clamped_indices(b.reshape(op.operands[1], row_shape), count)
    panel, column = n.append_binary("div", ids, width // group), n.append_binary("rem", ids, width // group)
    places = [b.reshape(x, (*row_shape, 1)) for x in (panel, n.append_binary("mul", column, group))]
    rank = len(row_shape)
    attrs = {
        "offset_dims": (rank, rank + 1), "collapsed_slice_dims": (0,), "operand_batching_dims": (),
        "start_indices_batching_dims": (), "start_index_map": (0, 2), "index_vector_dim": rank,
        "slice_sizes": (1, steps, group),
    }  # fmt: skip
    panel_rows = b.make("gather", (stored, b.make("concatenate", places, {"dim": rank})), attrs)
    terms = b.reshape(panel_rows, (*row_shape, steps * group))
    depth = static(op.operands[0].type.shape[1])
    return b.slice_dim(terms, rank, 0, depth) if depth != steps * group else terms


@dataclass(frozen=True, slots=True)
class Panels:
    """The quantized panels of a matmul's right operand ``weights`` (K, N); ``stored`` is (P, G, bytes of a chunk)."""

    weights: np.ndarray
    stored: np.ndarray
    cols: int
    bits: int
    terms: int

    def holds_table(self, table: np.ndarray) -> bool:
        """Return True if the rows of the embedding ``table`` are the columns of these quantized weights."""
        same = self.weights.dtype == table.dtype and self.weights.shape == table.shape[::-1]
        return same and np.array_equal(self.weights[:, 0], table[0]) and np.array_equal(self.weights.T, table)


def gathers_rows(op: Op) -> bool:
    """Return True if ``op`` gathers whole rows of a matrix."""
    if op.name != "gather" or op.operands[0].type.rank != 2 or op.attrs["operand_batching_dims"]:
        return False
    rows = tuple(op.attrs["collapsed_slice_dims"]) == tuple(op.attrs["start_index_map"]) == (0,)
    table, ids = op.operands[0].type, op.operands[1].type
    whole = tuple(dims_of(op.attrs, "slice_sizes")) == (1, table.shape[1])
    last = tuple(op.attrs["offset_dims"]) == (op.result.type.rank - 1,)
    return rows and whole and last and op.attrs["index_vector_dim"] >= ids.rank - 1


def arrays_only_read_by_rows(module: Module) -> Collection[int]:
    """Return the ``id`` of each constant array whose only readers are gathers of whole rows."""
    if not module.has("gather"):
        return ()
    arrays: dict[Value, np.ndarray] = {}
    tables: set[Value] = set()
    others = {v for f in module.functions.values() for v in f.body.results}
    for op in (op for f in module.functions.values() for op in walk(f.body)):
        if op.name == "constant":
            arrays[op.result] = op.attrs["value"]
        rows = gathers_rows(op)
        tables.update(op.operands[:1] if rows else ())
        others.update(op.operands[1:] if rows else op.operands)
        others.update(v for inner in op.regions for v in inner.results)
    refused = {id(array) for v, array in arrays.items() if v in others}
    return {id(arrays[v]) for v in tables if v in arrays} - refused


def rows_gathered_from_panels(op: Op, panels: Panels, b: Builder) -> Value:
    """Return the rows that ``op`` gathers, read from quantized panels; indices beyond the table read the last row."""
    table, ids = op.operands[0].type, op.operands[1]
    rows, depth = panels.weights.shape[::-1]
    n, row_shape = _row_integer_builder(op, b)
    rank, runs = len(row_shape), panels.stored.shape[1]
    ids = n.clamped_indices(b.reshape(ids, row_shape), rows)
    panel, column = n.append_binary("div", ids, panels.cols), n.append_binary("rem", ids, panels.cols)
    stored = b.constant(panels.stored, TensorType("u8", panels.stored.shape))
    d, per = np.arange(depth), 8 // panels.bits
    inside = panels.cols * SCALE_BYTES + d % panels.terms // per * panels.cols
    bytes_ = _gather_panel_bytes(stored, panel, d // panels.terms, _offset_sums(column, inside, b), b)
    whole = b.make("bitcast", (bytes_,), {}, TensorType("i8", bytes_.type.shape))
    if per == 2:
        up = b.constant((4 * (1 - d % 2)).astype(np.int8), TensorType("i8", (depth,)))
        four = b.broadcast(b.constant(4, TensorType("i8")), (), bytes_.type.shape)
        raised = b.make("shl", (whole, b.broadcast(up, (rank,), bytes_.type.shape)))
        whole = b.make("shr_arith", (raised, four))
    each = _gather_scales(stored, panel, n.append_binary("mul", column, SCALE_BYTES), b)
    each = b.broadcast(each, range(rank + 1), (*row_shape, runs, panels.terms))
    each = b.reshape(each, (*row_shape, runs * panels.terms))
    each = b.slice_dim(each, rank, 0, depth) if runs * panels.terms != depth else each
    return b.convert(b.make("mul", (b.convert(whole, "f32"), each)), table.dtype)


def _row_integer_builder(op: Op, b: Builder) -> tuple[_IndexBuilder, tuple[Dim, ...]]:
    """Return a builder of integer ops with one element per row that ``op`` gathers, and the shape of that array."""
    ids = op.operands[1].type
    row_shape = ids.shape if op.attrs["index_vector_dim"] == ids.rank else ids.shape[:-1]
    return _IndexBuilder(b, row_shape), row_shape


def _gather_scales(stored: Value, panel: Value, head: Value, b: Builder) -> Value:
    """Return the scales of each chunk of a row; the bytes of the first scale begin at ``head`` of a panel."""
    run = np.arange(static(stored.type.shape[1]))
    bits: Value | None = None
    for i in range(SCALE_BYTES):
        word = b.convert(_gather_panel_bytes(stored, panel, run, _offset_sums(head, np.full(len(run), i), b), b), "u32")
        up = b.broadcast(b.constant(8 * i, TensorType("u32")), (), word.type.shape)
        word = b.make("shl", (word, up))
        bits = word if bits is None else b.make("or", (bits, word))
    assert bits is not None
    return b.make("bitcast", (bits,), {}, TensorType("f32", bits.type.shape))


class _IndexBuilder:
    """Builder of ops on integers of one shape."""

    def __init__(self, b: Builder, shape: tuple) -> None:
        self.b, self.shape = b, shape

    def append_binary(self, name: str, x: Value, number: int) -> Value:
        """Append op ``name`` on ``x`` and a constant; return the result."""
        other = self.b.broadcast(self.b.constant(number, TensorType(x.type.dtype)), (), self.shape)
        return self.b.make(name, (x, other))

    def clamped_indices(self, ids: Value, rows: int) -> Value:
        """Return indices clamped to ``[0, rows)`` in their own dtype, then converted to i32."""
        low = ids if ids.type.dtype.startswith("u") else self.append_binary("max", ids, 0)
        bits = int(ids.type.dtype[1:]) - (not ids.type.dtype.startswith("u"))
        near = low if rows - 1 >= (1 << bits) - 1 else self.append_binary("min", low, rows - 1)
        return self.b.convert(near, "i32")


def _offset_sums(base: Value, offsets: np.ndarray, b: Builder) -> Value:
    """Return ``base`` plus each of ``offsets``, along a new last dim."""
    rank, shape = base.type.rank, (*base.type.shape, len(offsets))
    each = b.constant(offsets.astype(np.int32), TensorType("i32", offsets.shape))
    return b.make("add", (b.broadcast(base, range(rank), shape), b.broadcast(each, (rank,), shape)))


def _gather_panel_bytes(stored: Value, panel: Value, run: np.ndarray, place: Value, b: Builder) -> Value:
    """Gather the bytes of quantized panels at offsets ``place`` in the chunks ``run``."""
    rank, shape = panel.type.rank, place.type.shape
    runs = b.constant(run.astype(np.int32), TensorType("i32", run.shape))
    where = (b.broadcast(panel, range(rank), shape), b.broadcast(runs, (rank,), shape), place)
    index = b.make("concatenate", [b.reshape(x, (*shape, 1)) for x in where], {"dim": rank + 1})
    attrs = {
        "offset_dims": (), "collapsed_slice_dims": (0, 1, 2), "operand_batching_dims": (),
        "start_indices_batching_dims": (), "start_index_map": (0, 1, 2), "index_vector_dim": rank + 1,
        "slice_sizes": (1, 1, 1),
    }  # fmt: skip
    return b.make("gather", (stored, index), attrs)
