"""Table of importers: of StableHLO and CHLO ops, of other MLIR dialects that occur next to them, of custom calls."""

from __future__ import annotations

from aotc.frontend.calls.custom import import_custom_call
from aotc.frontend.importers.collective import COLLECTIVE
from aotc.frontend.importers.control import CONTROL
from aotc.frontend.importers.control_scan import CONTROL_SCAN
from aotc.frontend.importers.control_scf import CONTROL_SCF
from aotc.frontend.importers.elementwise import ELEMENTWISE
from aotc.frontend.importers.elementwise_math import ELEMENTWISE_MATH
from aotc.frontend.importers.indexing import INDEXING
from aotc.frontend.importers.linalg import LINALG
from aotc.frontend.importers.linalg_einsum import LINALG_EINSUM
from aotc.frontend.importers.random import RANDOM
from aotc.frontend.importers.reduction import REDUCTION
from aotc.frontend.importers.reduction_batch_norm import REDUCTION_BATCH_NORM
from aotc.frontend.importers.shape import SHAPE
from aotc.frontend.importers.shape_arith import SHAPE_ARITH
from aotc.frontend.importers.shape_broadcasting import SHAPE_BROADCASTING
from aotc.frontend.importers.shape_dialect import SHAPE_DIALECT
from aotc.frontend.importers.shape_tensor import SHAPE_TENSOR
from aotc.frontend.quantized.importer import QUANTIZED
from aotc.frontend.session import Importer
from aotc.ir.opset.spec import merge_op_tables

IMPORTERS: dict[str, Importer] = merge_op_tables(
    ELEMENTWISE, ELEMENTWISE_MATH, SHAPE, SHAPE_ARITH, SHAPE_BROADCASTING, SHAPE_TENSOR, SHAPE_DIALECT, INDEXING,
    REDUCTION, REDUCTION_BATCH_NORM, LINALG, LINALG_EINSUM, CONTROL, CONTROL_SCAN, CONTROL_SCF, COLLECTIVE, RANDOM,
    QUANTIZED, {"stablehlo.custom_call": import_custom_call},
)
