"""The table of importers: an op of StableHLO, CHLO or VHLO's quantized types to what imports it."""

from __future__ import annotations

from aotc.frontend.importers.collective import COLLECTIVES
from aotc.frontend.importers.control import CONTROL
from aotc.frontend.importers.control_scan import SCAN
from aotc.frontend.importers.elementwise import ELEMENTWISE
from aotc.frontend.importers.indexing import INDEXING
from aotc.frontend.importers.linalg import LINALG
from aotc.frontend.importers.linalg_einsum import EINSUM
from aotc.frontend.importers.random import RANDOM
from aotc.frontend.importers.reduction import REDUCTION
from aotc.frontend.importers.reduction_batch_norm import LEGACY
from aotc.frontend.importers.shape import SHAPE
from aotc.frontend.importers.shape_broadcasting import BROADCASTING
from aotc.frontend.quantized.importer import QUANTIZED
from aotc.frontend.session import Importer
from aotc.ir.opset.spec import merge

IMPORTERS: dict[str, Importer] = merge(
    ELEMENTWISE, SHAPE, INDEXING, REDUCTION, LINALG, CONTROL, COLLECTIVES, RANDOM, LEGACY, EINSUM, SCAN, BROADCASTING,
    QUANTIZED,
)
