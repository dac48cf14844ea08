"""Write ``docs/supported_ops.md`` from the tables of importers and the rules for GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aotc.frontend import op_importers as tables
from aotc.ir.opset.linalg_lapack import BLOCK_ROUTINES, JACOBI_ROUTINES, ROUTINES

HEAD = """\
# Supported ops

<!-- Written by `python docs/make_ops.py` from the compiler's tables; a test fails when it is out of date. -->

aotc imports each op of StableHLO and CHLO. CPUs run all of them. An NVIDIA GPU runs them too, except where the table
says "CPU": these run on the CPU of the same machine, with transfers, or are an error with `--no-host-fallback`.
`aotc lint MODEL --target=cuda` says what becomes of each op of a model.

CHLO ops that are not listed, such as `chlo.bessel_i1e`, are expanded to listed ones by jaxlib or by aotc's formulas.
"""
FAMILIES = {
    "Elementwise, conversions, comparisons": tables.ELEMENTWISE,
    "Shapes and movement": tables.SHAPE,
    "Gather, scatter, slices, sort": tables.INDEXING,
    "Reductions and windows": tables.REDUCTION | tables.REDUCTION_BATCH_NORM,
    "Matmul, convolution, FFT, factorisations": tables.LINALG | tables.LINALG_EINSUM,
    "Control flow, calls, tuples": tables.CONTROL | tables.CONTROL_SCAN,
    "Random numbers": tables.RANDOM,
    "Quantized types": tables.QUANTIZED,
    "Collectives, of one process or between ranks": tables.COLLECTIVE,
}
OTHERS = [
    tables.ELEMENTWISE, tables.ELEMENTWISE_MATH, tables.SHAPE_ARITH, tables.SHAPE_TENSOR, tables.SHAPE_DIALECT,
    tables.CONTROL, tables.CONTROL_SCF, tables.COLLECTIVE,
]  # fmt: skip
STABLEHLO, CHLO = "stablehlo.", "chlo."


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, "## StableHLO and CHLO\n", "| Ops | Names | GPU |\n|---|---|---|"]
    for title, table in FAMILIES.items():
        parts.append(f"| {title} | {_listed(n for n in table if n.startswith((STABLEHLO, CHLO)))} | yes |")
    parts += ["\n## Other dialects\n", "| Dialect | Ops | GPU |\n|---|---|---|"]
    others = sorted({name for table in OTHERS for name in table if not name.startswith((STABLEHLO, CHLO, "aotc."))})
    for dialect in sorted({name.partition(".")[0] for name in others}):
        names = [name.partition(".")[2] for name in others if name.startswith(f"{dialect}.")]
        parts.append(f"| `{dialect}` | {_listed(names)} | yes |")
    small = _listed(BLOCK_ROUTINES | JACOBI_ROUTINES)
    parts += [
        "\n## Custom calls\n",
        "| Call | Names | GPU |\n|---|---|---|",
        f"| LAPACK routines of `jax.numpy.linalg` and `jax.scipy.linalg` | {_listed(ROUTINES)} "
        f"| CPU; {small} of small matrices: GPU |",
        "| JAX's and XLA's own | top-k, windows of dynamic size, ragged products, sharding, Threefry | yes |",
        "| Your own ([custom calls](custom_calls.md)) | any name | with `gpu=`, else CPU |",
        "\n## Data types\n",
        DTYPES,
    ]
    return "\n".join(parts)


DTYPES = """\
| Type | Stored as |
|---|---|
| `i1`, `i2`, `i4`, `i8`, `i16`, `i32`, `i64`, `ui2` to `ui64` | NumPy's integers; `i2` and `i4` those of ml_dtypes |
| `f16`, `f32`, `f64`, `complex64`, `complex128` | NumPy's |
| `bf16`, and the eleven floats of 4, 6 and 8 bits of StableHLO | ml_dtypes |
| `!quant.uniform`, per tensor and per axis | the integers that it stores |
"""


def _listed(names: Iterable[str]) -> str:
    short = sorted(name.removeprefix(STABLEHLO) for name in names)
    return ", ".join(f"`{name}`" for name in short)


if __name__ == "__main__":
    Path(__file__).with_name("supported_ops.md").write_text(page())
