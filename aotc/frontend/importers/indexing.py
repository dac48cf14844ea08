"""Import of dynamic slices, gather, scatter, sort and top-k."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import stablehlo

from aotc.frontend.mlir_types import attribute_value, integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Expr


def _import_dynamic_slice(state: ImportState, op: Any) -> None:
    attrs = {"sizes": integer_tuple(op.attributes["slice_sizes"])}
    state.bind(op, [state.one("dynamic_slice", state.operands(op), attrs)])


def _import_dynamic_update_slice(state: ImportState, op: Any) -> None:
    state.bind(op, [state.one("dynamic_update_slice", state.operands(op))])


def _gather_attrs(op: Any, sizes: tuple) -> dict[str, Any]:
    """Return the attributes of a tensor IR ``gather`` from StableHLO's dimension numbers and slice ``sizes``."""
    numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
    names = (
        "offset_dims",
        "collapsed_slice_dims",
        "operand_batching_dims",
        "start_indices_batching_dims",
        "start_index_map",
    )
    return {
        **{n: tuple(getattr(numbers, n)) for n in names},
        "index_vector_dim": numbers.index_vector_dim,
        "slice_sizes": sizes,
    }


def _import_gather(state: ImportState, op: Any) -> None:
    attrs = _gather_attrs(op, integer_tuple(op.attributes["slice_sizes"]))
    state.bind(op, [state.one("gather", state.operands(op), attrs)])


def _import_dynamic_gather(state: ImportState, op: Any) -> None:
    x, indices, sizes = state.operands(op)
    attrs = _gather_attrs(op, state.dims_of(sizes, "the slice sizes of dynamic_gather"))
    state.bind(op, [state.one("gather", [x, indices], attrs)])


def _import_torch_index_select(state: ImportState, op: Any) -> None:
    """Import a selection of slices at ``indices`` along ``dim``, as a gather.

    The first ``batch_dims`` dims of the operand and of the indices are batch dims.
    """
    x, indices = state.operands(op)
    dim, batch = op.attributes["dim"].value, op.attributes["batch_dims"].value
    dim, batch = dim + x.type.rank * (dim < 0), batch + indices.type.rank * (batch < 0)
    if not 0 <= batch <= dim < x.type.rank or batch > indices.type.rank:
        ranks = f"operands of rank {x.type.rank} and {indices.type.rank}"
        message = f"{op.name}: dim {dim} and batch_dims {batch} do not fit {ranks}"
        state.fail(message, "batch_dims of at most dim, and dim below the rank of the first operand")
    chosen = indices.type.rank - batch  # these dims of the result replace dim
    pairs = tuple(range(batch))
    attrs = {
        "offset_dims": (*range(batch, dim), *range(dim + chosen, x.type.rank - 1 + chosen)),
        "collapsed_slice_dims": (dim,),
        "operand_batching_dims": pairs,
        "start_indices_batching_dims": pairs,
        "start_index_map": (dim,),
        "index_vector_dim": indices.type.rank,
        "slice_sizes": tuple(1 if d in (*pairs, dim) else n for d, n in enumerate(x.type.shape)),
    }
    state.bind(op, [state.one("gather", [x, indices], attrs)])


def _import_scatter(state: ImportState, op: Any) -> None:
    """Import ``scatter``: operands in the dtypes of its combiner, and the dimension numbers as attributes."""
    numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
    operands = state.operands(op)
    names = ("update_window_dims", "inserted_window_dims", "input_batching_dims", "scatter_indices_batching_dims")
    attrs: dict[str, Any] = {
        "inputs": (len(operands) - 1) // 2,
        **{n: tuple(getattr(numbers, n)) for n in names},
        "scatter_dims_to_operand_dims": tuple(numbers.scattered_dims_to_operand_dims),
        "index_vector_dim": numbers.index_vector_dim,
        "unique_indices": bool(attribute_value(op, "unique_indices", False)),
        "indices_are_sorted": bool(attribute_value(op, "indices_are_sorted", False)),
    }
    block, count = op.regions[0].blocks[0], attrs["inputs"]
    data = state.promoted([*operands[:count], *operands[count + 1 :]], [state.dtype(a.type) for a in block.arguments])
    operands = [*data[:count], operands[count], *data[count:]]
    combiner = state.scalar_region(block)
    state.bind(op, state.emit("scatter", operands, attrs, (), [combiner]))


def _import_sort(state: ImportState, op: Any) -> None:
    """Import ``sort``; a negative dim counts from the end."""
    operands = state.operands(op)
    dim = attribute_value(op, "dimension", -1)
    attrs = {"dim": dim % max(operands[0].type.rank, 1), "stable": bool(attribute_value(op, "is_stable", False))}
    comparator = state.scalar_region(op.regions[0].blocks[0])
    state.bind(op, state.emit("sort", operands, attrs, (), [comparator]))


def _import_top_k(state: ImportState, op: Any) -> None:
    state.bind(op, state.emit("top_k", state.operands(op), {"k": op.attributes["k"].value}))


def _import_dynamic_top_k(state: ImportState, op: Any) -> None:
    x, k = state.operands(op)
    size = state.dims_of(k, "k of dynamic_top_k")[0]
    state.bind(op, state.emit("top_k", [x], {"k": size if isinstance(size, Expr) else int(size)}))


INDEXING: dict[str, Importer] = {
    "stablehlo.dynamic_slice": _import_dynamic_slice,
    "stablehlo.dynamic_update_slice": _import_dynamic_update_slice,
    "stablehlo.gather": _import_gather,
    "stablehlo.dynamic_gather": _import_dynamic_gather,
    "stablehlo.torch_index_select": _import_torch_index_select,
    "stablehlo.scatter": _import_scatter,
    "stablehlo.sort": _import_sort,
    "chlo.top_k": _import_top_k,
}
INDEXING_CALLS: dict[str, Importer] = {"stablehlo.dynamic_top_k": _import_dynamic_top_k}
