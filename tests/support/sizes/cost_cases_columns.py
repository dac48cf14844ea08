"""Sums along few or many columns, and matmuls of that form: sizes on either side of each row of their cost table."""

import jax
import jax.numpy as jnp
import numpy as np

from support.cost_cases import COLUMNS, PRODUCT, V3, Case, case, pair, sizes

TURNED = lambda x, w: x @ w.T


def parts(count, then=lambda x: x):
    """Return the function that concatenates ``count`` overlapping parts of rows."""
    return lambda x: then(jnp.concatenate([x[:, i : i + 5 + i % 3] for i in range(count)], 1))


class Joined(Case):
    """A concatenation of many copies of rows in one op; JAX's own programs have at most 16."""

    def exported(self) -> str:
        """Return the program's text."""
        one, count = "tensor<3x7xf32>", 140
        many, types, operands = f"tensor<3x{7 * count}xf32>", ", ".join([one] * count), ", ".join(["%x"] * count)
        return f"""func.func @main(%x: {one}) -> {many} {{
          %0 = "stablehlo.concatenate"({operands}) {{dimension = 1 : i64}} : ({types}) -> {many}
          return %0 : {many}
        }}"""


def longer(x):
    """Compute several functions of each element."""
    for n in range(10):
        x = jnp.abs(x) * (n + 0.5)
    return x


FEW_COLUMNS = [(2, 257, 300), (2, 300, 1)]
FEW_ROWS = [
    *sizes(PRODUCT, lambda m: [(m, 301), (301, 256)], 1, 3, 8),
    *sizes(PRODUCT, lambda m: [(m, 300), (300, 257)], 2, 5, target=V3),
    *sizes(PRODUCT, lambda m: [(m, 301), (301, 256)], 1, 4, dtype="bfloat16"),
]
BATCH = sizes(PRODUCT, lambda m: [(3, m, 300), (3, 300, 300)], 1, 4)
FEW_VECTORS = [
    *sizes(PRODUCT, lambda n: [(259, 300), (300, n)], 1, 3, 8),
    *sizes(TURNED, lambda m: [(m, 301), (258, 301)], 2, 5, 7),
    *sizes(PRODUCT, lambda n: [(259, 300), (300, n)], 1, 4, dtype="float16"),
    case(PRODUCT, *FEW_COLUMNS),
]
FETCHED = [
    *sizes(TURNED, lambda m: [(m, 1201), (258, 1201)], 3, 4, 8),
    *sizes(PRODUCT, lambda m: [(m, 301), (301, 529)], 1, 8, dtype="bfloat16"),
    *sizes(PRODUCT, lambda n: [(259, 600), (600, n)], 3, target=V3),
]
PARTS = [
    *sizes(PRODUCT, lambda n: [(263, 1201), (1201, n)], 5, 8),
    *sizes(TURNED, lambda m: [(m, 1100), (258, 1100)], 6, dtype="bfloat16"),
    *sizes(PRODUCT, lambda n: [(1003, 700), (700, n)], 7, target=V3),
]
SUMS = sizes(COLUMNS, lambda n: [(600, n)], 128, 1000, 9001)


def gelu_of_columns(w, x, b):
    """Return a matmul with an epilogue in its kernel."""
    return jax.nn.gelu(w @ x + b[:, None])


def depthwise(x, w):
    """Return a depthwise convolution: each channel has its own weights."""
    more = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": x.shape[-1]}
    return jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", **more) + w[0, 0, 0])


def all_turned(*arrays):
    """Return the sum of transposes."""
    return sum(x.T for x in arrays) * 2


TAPS = [
    *sizes(depthwise, lambda n: [(2, 9, n + 4, 32), (5, 5, 1, 32)], 8, 13),
    *sizes(depthwise, lambda n: [(1, 9, n + 8, 32), (3, 9, 1, 32)], 1, 7, 8, 9, 13, 16),
    *sizes(depthwise, lambda n: [(1, 8, n + 6, 48), (7, 7, 1, 48)], 11, 12, dtype="bfloat16"),
    *sizes(depthwise, lambda n: [(1, 8, n + 4, 48), (5, 5, 1, 48)], 7, 15, target=V3),
]
def by_constant(x):
    """Multiply rows by a constant of eight columns."""
    return x @ np.random.default_rng(0).standard_normal((x.shape[1], 8)).astype("float32")


LIMITS = {
    "few_turned": pair(lambda x, y: x.T + y, [(24, 320), (320, 24)], [(64, 320), (320, 64)]),
    "turned_operands": pair(all_turned, [(64, 48)] * 4, [(64, 48)] * 5),
    "thin_rows": pair(PRODUCT, [(8, 512), (512, 160)], [(9, 512), (512, 160)]),
    "half_panel_columns": pair(PRODUCT, [(32, 512), (512, 7)], [(32, 512), (512, 8)]),
    "padded_panel_bytes": pair(by_constant, (2, 512), (2, 2048)),
    "many_thin_rows": pair(PRODUCT, [(31, 512), (512, 4)], [(400, 512), (512, 4)]),
    "short_thin_terms": pair(PRODUCT, [(400, 100), (100, 4)], [(400, 200), (200, 4)]),
    "narrow_cpu_columns": pair(COLUMNS, (300, 100), (300, 600)),
    "light_column": (case(COLUMNS, (300, 600)), case(lambda x: jnp.sin(x).sum(0), (300, 600))),
    "shared_rows": pair(lambda x, w: (x[:, :, None] * w[None]).sum(1), [(4, 70), (70, 200)], [(9, 70), (70, 200)]),
    "long_pieces": pair(COLUMNS, (300, 5000), (300, 9000)),
    "few_block_rows": pair(lambda w, x: (w * x).sum(1), [(3, 300), (3, 300)], [(9, 300), (300,)]),
    "near_bytes": pair(PRODUCT, [(5, 70), (70, 203)], [(5, 261), (261, 257)]),
    "unfetched_columns": pair(PRODUCT, [(259, 600), (600, 2)], [(259, 601), (601, 3)]),
    "rested_rows": pair(PRODUCT, [(1, 1009), (1009, 203)], [(2, 1009), (1009, 203)]),
    "whole_columns": pair(PRODUCT, [(259, 600), (600, 4)], [(259, 600), (600, 5)]),
    "unrolled_row": pair(lambda x: jnp.sqrt((x * x).sum(1)), (40, 3), (40, 9)),
    "unrolled_longer_row": pair(lambda x: jax.nn.logsumexp(x, axis=1), (40, 13), (40, 15)),
    "light_numbers": (
        case(lambda x: jnp.sqrt((x * x).sum(1)), (40, 20)),
        case(lambda x, w: jax.nn.sigmoid((x * w).sum(-1)), (3, 37, 20), (20,)),
    ),
    "many_segments": (case(parts(5), (3, 300)), Joined(lambda x: jnp.tile(x, (1, 140)), ((3, 7),))),
    "segment_operations": (case(parts(16), (3, 300)), case(parts(16, longer), (3, 300))),
    "short_block_row": pair(lambda w, x: (w * x).sum(1), [(40, 40), (40,)], [(40, 100), (100,)]),
}
DENSE = case(gelu_of_columns, (259, 300), (300, 4), (259,))
BLOCKS = {
    "held_weights": TAPS,
    "beside_pixels": TAPS,
    "accumulator_percent": [*FEW_ROWS, *BATCH],
    "column_terms": FEW_ROWS,
    "column_items": BATCH,
    "column_item_elements": BATCH,
    "fetch_line": [*FEW_ROWS, *FETCHED],
    "fetched_bytes": FETCHED,
    "part_bytes": PARTS,
    "part_rows": PARTS,
    "fetched_turns": PARTS,
    "block_rows": [*FEW_VECTORS, DENSE],
    "row_block_elements": FEW_VECTORS,
    "part_elements": SUMS,
    "column_part_terms": SUMS,
    "unknown_columns": sizes(COLUMNS, lambda n: [(40, n)], 500, 512, 1030, spec="_, n"),
}
