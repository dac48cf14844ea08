"""Split windowed reductions into several steps, if one step would repeat work or run on a single core.

- Windows over several dims become windows over one dim at a time: ``k + k`` instead of ``k * k`` elements.
- Large windows that overlap become two scans of blocks as long as a window (M. van Herk, 1992; J. Gil and M. Werman,
  "Computing 2-D min, median, and max filters", 1993): a window is the end of one block and the beginning of the next::

      x        | 0 1 2 3 | 4 5 6 7 |        windows of 4
      window       [2 3     4 5]       =  combine(scan from the right [2], scan from the left [5])

- A long scan, of which only few run in parallel, is cut into parts, each scanned separately; then each part is combined
  with the total of the parts before it::

      before   %y = reduce_window %x ... : f32[1000000]
      after    %own = reduce_window (reshape %x) : f32[32, 31250];  %ends = %own[:, -1]
               %y = reshape (add (broadcast (scan of %ends, shifted by one)), %own)

- Gradients of maxima of windows become gathers (:mod:`aotc.lowering.passes.canonicalize.pool_gradients`).

The parts use the initial value several times, so it must be neutral; StableHLO requires that for combiners of several
ops. The steps are part of the program, so results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.opset import SCALARS
from aotc.ir.opset.dim_attributes import dims_of, number_pairs_of, numbers_of, pairs_of
from aotc.ir.opset.reduction import REDUCTION
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Module, Op, Value
from aotc.lowering.analysis.prefix_scans import Scan, combiner_op_name, has_neutral_start, scan_of, windowed_dims
from aotc.lowering.passes.canonicalize.pool_gradients import gather_for_pool_gradient
from aotc.lowering.passes.rewrite import Builder, lift_region, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.gpu_column_scans import plan_column_scan
from aotc.lowering.plans.thresholds import SCAN_LANES
from aotc.lowering.threshold import BlockSize, Limit
from aotc.options import Options


def split_windows(module: Module, options: Options) -> Module:
    """Split windowed reductions that repeat work, and long prefix scans, into several cheaper steps."""
    home, _ = op_targets(module, options)
    return rewrite_module(module, lambda op, b: _split_window_rule(op, b, home(op).kind), REDUCTION)


def _split_window_rule(op: Op, b: Builder, kind: str) -> Sequence[Value] | None:
    """Return the cheaper steps that replace a windowed reduction or a pooling gradient, or None to leave the op."""
    if op.name == "select_and_scatter":
        return gather_for_pool_gradient(op, kind, b)
    if op.name != "reduce_window" or not _has_elementwise_combiner(op):
        return None
    widths = (*dims_of(op.attrs, "window"), *(p for pair in pairs_of(op.attrs) for p in pair))
    if not is_static((*op.operands[0].type.shape, *widths)):
        return None
    if 0 in op.operands[0].type.shape or 0 in op.results[0].type.shape:
        return None
    scan, neutral = scan_of(op), has_neutral_start(op, b.definitions)
    if scan is not None:
        parts = _scan_part_count(op, scan, kind)
        return _scan_in_parts(op, scan, parts, b) if parts > 1 and (neutral or combiner_op_name(op) is None) else None
    if not neutral:
        return None
    moved = windowed_dims(op)
    if len(moved) > 1:
        return _windows_dim_by_dim(op, moved, b, kind)
    return _windows_by_two_scans(op, moved[0], b) if moved and _is_large_window(op, moved[0]) else None


def _has_elementwise_combiner(op: Op) -> bool:
    return all(inner.name in SCALARS or inner.name == "constant" for inner in op.regions[0].ops)


def _reduce_window_like(op: Op, operands: Sequence[Value], b: Builder, **attrs: object) -> Op:
    """Return a ``reduce_window`` like ``op`` with other operands and attributes."""
    region = copy_region(op.regions[0], b.names)
    return b.op("reduce_window", operands, {**op.attrs, **attrs}, hint="window", regions=(region,))


def _append_scan(op: Op, inputs: Sequence[Value], scan: Scan, b: Builder) -> tuple[Value, ...]:
    """Append the scan of ``inputs`` with the combiner and the initial values of ``op``."""
    shape = inputs[0].type.shape
    ones = (1,) * len(shape)
    n = static(shape[scan.dim])
    window, padding = list(ones), [(0, 0)] * len(shape)
    window[scan.dim], padding[scan.dim] = n, (0, n - 1) if scan.reverse else (n - 1, 0)
    plain = dict.fromkeys(("strides", "base_dilations", "window_dilations"), ones)
    return b.append(
        _reduce_window_like(op, (*inputs, *op.inits), b, window=tuple(window), padding=tuple(padding), **plain)
    )


# --- several dims --------------------------------------------------------------


WINDOW_TERMS = Limit(
    31,
    "elements of a window over several dims that is reduced in one step",
    "each further step goes through memory once more",
)


def _windows_dim_by_dim(op: Op, moved: list[int], b: Builder, kind: str) -> Sequence[Value] | None:
    """Split a window reduction into one step per dim if that halves the work; else return None."""
    a, shape = op.attrs, [static(s) for s in op.operands[0].type.shape]
    results = [static(s) for s in op.result.type.shape]
    many = prod(numbers_of(a, "window"))
    order = sorted(moved, key=lambda d: (-a["strides"][d], -d))
    work, left = 0, list(shape)
    for d in order:
        left[d] = results[d]
        work += prod(left) * numbers_of(a, "window")[d]
    if WINDOW_TERMS.holds(many) or 2 * work > prod(results) * many:
        return None
    x, init = op.operands
    for d in order:
        own = {key: tuple(v if k == d else 1 for k, v in enumerate(a[key])) for key in a if key != "padding"}
        padding = tuple(tuple(p) if k == d else (0, 0) for k, p in enumerate(number_pairs_of(a)))
        step = _reduce_window_like(op, (x, init), b, **own, padding=padding)
        (x,) = _split_window_rule(step, b, kind) or b.append(step)
    return (x,)


# --- one dim -------------------------------------------------------------------


WINDOW_LENGTH = Limit(
    63,
    "elements of a window over one dim that are reduced one by one",
    "two scans and the op that joins them take several passes over memory",
)
WINDOW_OVERLAP = Limit(
    15,
    "windows that contain an element, each of which adds it again",
    "two scans and the op that joins them take several passes over memory",
)


def _is_large_window(op: Op, d: int) -> bool:
    """Return True if windows along dim ``d`` are long and overlap enough for two scans to cost less."""
    a = op.attrs
    if any(a[key][d] != 1 for key in ("base_dilations", "window_dilations")) or min(number_pairs_of(a)[d]) < 0:
        return False
    windows = static(op.result.type.shape[d])
    covered = static(op.operands[0].type.shape[d]) + sum(number_pairs_of(a)[d])
    length = numbers_of(a, "window")[d]
    return not WINDOW_LENGTH.holds(length) and not WINDOW_OVERLAP.holds(windows * length // covered)


def _windows_by_two_scans(op: Op, d: int, b: Builder) -> Sequence[Value]:
    """Return a window reduction as two scans per window-sized block: suffixes and prefixes, combined."""
    x, init = op.operands
    a, (low, high), w = op.attrs, number_pairs_of(op.attrs)[d], numbers_of(op.attrs, "window")[d]
    windows, stride = static(op.result.type.shape[d]), a["strides"][d]
    covered = static(x.type.shape[d]) + low + high
    blocks = -(-covered // w)
    x = b.pad(x, init, {d: low}, {d: high + blocks * w - covered})
    lead, tail = x.type.shape[:d], x.type.shape[d + 1 :]
    x = b.reshape(x, (*lead, blocks, w, *tail))
    (ends,) = _append_scan(op, (x,), Scan(d + 1, reverse=True), b)
    (begins,) = _append_scan(op, (x,), Scan(d + 1, reverse=False), b)
    begins = b.pad(begins, init, {d: -1, d + 1: 1}, {d: 1, d + 1: -1})
    last = (windows - 1) * stride + 1
    parts = [b.slice_dim(b.reshape(v, (*lead, blocks * w, *tail)), d, 0, last, stride) for v in (ends, begins)]
    return lift_region(op.regions[0], parts, b)


# --- long scans ----------------------------------------------------------------


GPU_SCAN_BLOCKS = BlockSize(1024, "blocks that scan parts of rows, at least", "eight for each of 128 multiprocessors")
GPU_SCAN_COLUMNS = BlockSize(
    1 << 17,
    "threads that scan parts of columns, at least",
    "1024 for each of 128 multiprocessors",
)
GPU_SCAN_PART = BlockSize(
    1 << 11,
    "elements of a part of a row that a block scans, at least",
    "the elements that its threads read at a time",
)
GPU_SCAN_COLUMN_PART = BlockSize(
    32,
    "elements of a part of a column that a thread scans, at least",
    "the ends of the parts, which are scanned again, are few compared with it",
)
LONG_SCAN = Limit(
    (1 << 15) - 1,
    "elements of a scan that one core does",
    "tens of microseconds of serial work, several claims of the scheduler",
)
FEW_SCANS = Limit(7, "independent blocks of scans that are too few for all cores", "8 cores are common")
FEWEST_SCAN_PARTS = BlockSize(16, "parts of a long scan, at least", "two for each of 8 cores")
SCAN_PARTS = BlockSize(64, "parts of a long scan, at most", "the scan of the ends of the parts is serial")


def _scan_part_count(op: Op, scan: Scan, kind: str) -> int:
    """Return the number of equal parts into which a prefix scan is split."""
    shape = [static(s) for s in op.operands[0].type.shape]
    n, lead, tail = shape[scan.dim], prod(shape[: scan.dim]), prod(shape[scan.dim + 1 :])
    if kind == "cuda":
        if plan_column_scan(op, scan) is not None:
            return 1
        blocks, least = (GPU_SCAN_BLOCKS, GPU_SCAN_PART) if tail == 1 else (GPU_SCAN_COLUMNS, GPU_SCAN_COLUMN_PART)
        parts = min(n // least.value, -(-blocks.value // (lead * tail)))
        fewest, most = -(-parts // 2), parts
    else:
        long = not LONG_SCAN.holds(n) and FEW_SCANS.holds(lead * -(-tail // SCAN_LANES.value))
        fewest, most = (FEWEST_SCAN_PARTS.value, SCAN_PARTS.value) if long else (1, 1)
    return max((p for p in range(fewest, most + 1) if p and n % p == 0), default=most)


def _scan_in_parts(op: Op, scan: Scan, parts: int, b: Builder) -> Sequence[Value]:
    """Return a prefix scan in ``parts``: scan each part, then combine it with the total of earlier parts."""
    d = scan.dim
    n = static(op.operands[0].type.shape[d])
    size = -(-n // parts)
    spare = {d: parts * size - n}
    lead, tail = op.operands[0].type.shape[:d], op.operands[0].type.shape[d + 1 :]
    low, high = (spare, {}) if scan.reverse else ({}, spare)
    whole = [b.pad(v, init, low, high) for v, init in zip(op.inputs, op.inits, strict=True)]
    own = _append_scan(op, [b.reshape(v, (*lead, parts, size, *tail)) for v in whole], Scan(d + 1, scan.reverse), b)
    last = 0 if scan.reverse else size - 1
    ends = [b.reshape(b.slice_dim(v, d + 1, last, last + 1), (*lead, parts, *tail)) for v in own]
    one, less = ({d: -1}, {d: 1}) if scan.reverse else ({d: 1}, {d: -1})
    shifted = [b.pad(v, init, one, less) for v, init in zip(ends, op.inits, strict=True)]
    before = _append_scan(op, shifted, Scan(d, scan.reverse), b)
    others = tuple(k for k in range(len(lead) + 2 + len(tail)) if k != d + 1)
    wide = [b.broadcast(v, others, o.type.shape) for v, o in zip(before, own, strict=True)]
    both = (*own, *wide) if scan.reverse else (*wide, *own)
    results = lift_region(op.regions[0], both, b)
    begin = spare[d] if scan.reverse else 0
    return [b.slice_dim(b.reshape(v, (*lead, parts * size, *tail)), d, begin, begin + n) for v in results]
