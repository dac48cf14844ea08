"""Cases for the thresholds of weight quantization, and of the kernels that multiply quantized weights and pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from support.cost_cases import MATRIX, PRODUCT, VNNI, case, integer_product, pair


def times(rows: int, columns: int) -> Callable[[Any], Any]:
    """Return the matmul with a constant whose columns all have scale 1."""
    weights = np.random.default_rng(0).integers(-127, 128, (rows, columns))
    weights[rows // 2] = 127
    return lambda x: x @ weights.astype(x.dtype)


LIMITS = {
    "quantized_bytes": (
        case(times(64, 48), (3, 64), quantize="int8"),
        case(times(256, 144), (3, 256), quantize="int8"),
    ),
    "quantized_percent": (
        case(times(512, 96), (3, 512), quantize="int8", dtype="bfloat16"),
        case(times(2048, 20), (3, 2048), quantize="int8", dtype="bfloat16"),
    ),
    "unpaired_rows": pair(times(512, 96), (1, 512), (3, 512), quantize="int8", dtype="bfloat16"),
    **{
        name: pair(integer_product, *shapes, dtype="int8", target=VNNI)
        for name, shapes in {
            "signed_rows": ([(100, 256), (256, 144)], [(130, 256), (256, 144)]),
            "signed_terms": ([(600, 96), (96, 144)], [(600, 132), (132, 144)]),
            "signed_flops": ([(140, 140), (140, 40)], [(140, 140), (140, 144)]),
        }.items()
    },
    **{
        name: pair(PRODUCT, *([(m, 64), (64, n)] for m, n in sizes), dtype="bfloat16", target=MATRIX)
        for name, sizes in {"copied_panels": [(64, 224), (64, 250)], "copied_rows": [(16, 512), (33, 512)]}.items()
    },
    "widened_rows": pair(times(512, 96), (3, 512), (400, 512), quantize="int8", dtype="bfloat16"),
}
