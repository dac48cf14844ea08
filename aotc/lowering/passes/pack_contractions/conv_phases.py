"""Compute convolutions of dilated inputs without multiplying by the zeros between the pixels.

Transposed convolutions, and gradients of strided convolutions, have dilated inputs. With ``gap - 1`` zeros between
neighbouring pixels, output ``gap * q + p`` reads pixels only at every ``gap``-th tap, starting with tap ``t = (low - p)
mod gap``. So each *phase* ``p`` of the output is a convolution of the original pixels with a part of the kernel::

    y[gap*q + p] = sum_j k[t + gap*j] * x[q + j + (p + t - low) / gap]

Neighbouring phases that read the same pixels, a *run*, become one convolution with the output channels of each. If
windows do not overlap, as in the gradient of a convolution of patches, all phases are one run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from aotc.ir.dims.algebra import product, static
from aotc.ir.opset.dim_attributes import pairs_of
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.rewrite import Builder

Convolve = Callable[[Value, Value, tuple[int, ...]], Value]
"""Appends the convolution of padded pixels by a kernel, with the given number of outputs along each spatial dim."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring phases of a dim that read the same pixels.

    Attributes
    ----------
    tap : int
        The first tap of the last phase. Each earlier phase begins one tap later.
    taps : int
        The number of taps of each phase.
    phases : int
        The number of phases.
    low, high : int
        The padding of the pixels for the convolution that computes all outputs of a phase. Negative padding removes
        pixels.
    """

    tap: int
    taps: int
    phases: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class PhasedConvolution:
    """A convolution of ``pixels`` [N, spatial, C] dilated by ``gaps``; ``runs`` holds the runs of each spatial dim."""

    pixels: Value
    kernel: Value
    gaps: tuple[int, ...]
    runs: tuple[list[Run], ...]
    outputs: tuple[int, ...]
    groups: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of outputs per phase along each spatial dim."""
        return tuple(-(-n // gap) for n, gap in zip(self.outputs, self.gaps))


def has_phases(op: Op) -> bool:
    """Return True if ``op`` is a ``convolution`` with dilated pixels that :func:`convolve_by_phases` supports.

    Sizes must be known, without strides, kernel dilation and batch groups.
    """
    a, (lhs, rhs), result = op.attrs, op.operands, op.result.type
    sizes = [*(lhs.type.shape[d] for d in a["input_spatial"]), *(rhs.type.shape[d] for d in a["kernel_spatial"])]
    sizes += [result.shape[d] for d in a["output_spatial"]]
    static_sizes = all(isinstance(n, int) and n > 0 for n in sizes) and all(isinstance(n, int) for n, _ in pairs_of(a))
    whole = all(n == 1 for n in (*a["strides"], *a["rhs_dilation"], a["batch_groups"]))
    return static_sizes and whole and any(n > 1 for n in a["lhs_dilation"])


def convolve_by_phases(spread: PhasedConvolution, convolve: Convolve, b: Builder) -> Value:
    """Append the convolutions of all runs, by ``convolve``, and return the result with phases interleaved."""
    runs, outputs, n = spread.runs, spread.outputs, spread.pixels.type.shape[0]

    def joined(chosen: tuple[Run, ...]) -> Value:
        """Return the phases after the ``chosen`` runs of the first dims, joined along the next dims."""
        d = len(chosen)
        if d == len(runs):
            return _convolve_phase_runs(spread, chosen, convolve, b)
        parts = [joined((*chosen, run)) for run in runs[d]]
        return parts[0] if len(parts) == 1 else b.make("concatenate", parts, {"dim": 2 * d + 2})

    sizes = tuple(size * gap for size, gap in zip(spread.sizes, spread.gaps))
    whole = b.reshape(joined(()), (n, *sizes, spread.kernel.type.shape[-1]))
    if sizes == outputs:
        return whole
    return b.slice(whole, (0,) * whole.type.rank, (n, *outputs, whole.type.shape[-1]))


def phase_runs(gap: int, low: int, outputs: int, pixels: int, taps: int) -> list[Run]:
    """Return the runs of neighbouring output phases of one dim that read the same pixels."""
    size = -(-outputs // gap)

    def pixel_range(p: int) -> tuple[int, int]:
        tap = (low - p) % gap
        return (p + tap - low) // gap, max(-(-(taps - tap) // gap), 0)

    runs = []
    for (first, count), members in groupby(range(gap), pixel_range):
        phases = list(members)
        tap = (low - phases[-1]) % gap
        runs.append(Run(tap, count, len(phases), -first, size + count - 1 - pixels + first))
    return runs


def _convolve_phase_runs(spread: PhasedConvolution, runs: tuple[Run, ...], convolve: Convolve, b: Builder) -> Value:
    """Convolve one run of phases per spatial dim; return [N, outputs, phases, ..., C], two axes per dim."""
    x, sizes, counts = spread.pixels, spread.sizes, tuple(run.phases for run in runs)
    n, c, groups, rank = x.type.shape[0], static(spread.kernel.type.shape[-1]), spread.groups, len(runs)
    if any(run.taps == 0 for run in runs):
        pairs = [m for pair in zip(sizes, counts) for m in pair]
        return b.constant(0, TensorType(x.type.dtype, (n, *pairs, c)))
    padded = b.pad(x, None, {d: r.low for d, r in enumerate(runs, 1)}, {d: r.high for d, r in enumerate(runs, 1)})
    convolved = convolve(padded, _phase_run_weights(spread, runs, b), sizes)
    split = b.reshape(convolved, (n, *sizes, groups, *counts, c // groups))
    axes = [axis for d in range(rank) for axis in (1 + d, rank + 2 + d)]
    moved = b.transpose(split, (0, *axes, rank + 1, 2 * rank + 2))
    return b.reshape(moved, (*moved.type.shape[:-2], c))


def _phase_run_weights(spread: PhasedConvolution, runs: Sequence[Run], b: Builder) -> Value:
    """Return the convolution weights of all output phases in ``runs``, as output channels (group, phase, channel)."""
    kernel, gaps = spread.kernel, spread.gaps
    *taps, features, c = map(static, kernel.type.shape)
    rank = len(runs)
    ends = [run.tap + run.taps * gap for run, gap in zip(runs, gaps)]
    kernel = b.pad(kernel, None, {}, {d: max(end - n, 0) for d, (end, n) in enumerate(zip(ends, taps))})
    cut = b.slice(kernel, (*(run.tap for run in runs), 0, 0), (*ends, features, c))
    pairs = [m for run, gap in zip(runs, gaps) for m in (run.taps, gap)]
    split = b.reshape(cut, (*pairs, features, spread.groups, c // spread.groups))
    for d, run in enumerate(runs):
        split = b.slice_dim(split, 2 * d + 1, 0, run.phases)
    backwards = tuple(2 * d + 1 for d, run in enumerate(runs) if run.phases > 1)
    split = b.make("reverse", (split,), {"dims": backwards}) if backwards else split
    order = [*range(0, 2 * rank, 2), 2 * rank, 2 * rank + 1, *range(1, 2 * rank, 2), 2 * rank + 2]
    phases = product(run.phases for run in runs)
    return b.reshape(b.transpose(split, order), (*(run.taps for run in runs), features, phases * c))
