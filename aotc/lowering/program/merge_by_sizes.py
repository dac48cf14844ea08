"""Merge kernels that differ only in sizes into one kernel with the sizes as arguments, so that it is compiled once.

    for i0 in range(0, 64):                      for i0_vector in range(0, 4*size0):
        o0[i0] = a0[i0] + 1.0                        for i0 in range(0, 16):
    for i0 in range(0, 192):              ->             o0[i0 + 16*i0_vector] = a0[i0 + 16*i0_vector] + 1.0
        o0[i0] = a0[i0] + 1.0                    of size0 = 1 and of size0 = 3

Layers of a network have such kernels, for example padding of images, or normalisation by channel statistics. The text
of a kernel defines its meaning, so any number in it may be replaced by an expression of the same value. Reductions are
not merged, as their code depends on sizes. Neither are innermost loops that are not whole vectors or access many
arrays. The number of terms of a tile may be an argument, except for a matrix unit, whose last step has different code
for each number of terms.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import NamedTuple, TypeAlias

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.dims.symbols import calls_in, symbols
from aotc.ir.loop.access import loads_and_indices, statement_index_exprs, statement_scalars
from aotc.ir.loop.ir import Alloc, For, If, Index, Kernel, Let, Load, Stmt, Store, Tile, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.lowering.analysis.index_maps import linearize
from aotc.lowering.program.while_kernels.inline_kernels import InlinedKernelRenamer, substitute_loop_values
from aotc.vmfb.abi import ALIGNMENT, MAX_DIMS
from aotc.vmfb.dtypes import DTYPES, size_of

Row: TypeAlias = tuple[int, ...]
"""What stands at one place of the texts of some kernels, in each of them."""


class CutText(NamedTuple):
    """A kernel's text without its numbers, and the numbers between its words."""

    words: tuple[str, ...]
    numbers: Row


class MergedBySizes(NamedTuple):
    """The merged kernel that replaces a kernel, and the values of its size arguments."""

    kernel: Kernel
    sizes: tuple[int, ...]


def merge_by_sizes(kernels: Iterable[Kernel], matrices: Collection[str] = ()) -> dict[str, MergedBySizes]:
    """Return the merged kernels, by name, of CPU kernels that differ only in sizes; no two may be equal.

    ``matrices`` are the forms of tiles that a matrix unit multiplies.
    """
    alike = [kernel for some in _groups_by_key(kernels, _text_key_of_kernel) for kernel in some]
    merged: dict[str, MergedBySizes] = {}
    for some in _groups_by_key(map(_with_flat_arrays, alike), partial(_numbers_that_must_be_equal, matrices=matrices)):
        merged |= _groups_of_equal_text(some)
    return merged


def _groups_by_key(kernels: Iterable[Kernel], key: Callable[[Kernel], tuple | None]) -> list[list[Kernel]]:
    """Return groups of several kernels that share a key; kernels whose key is None are left out."""
    groups: dict[tuple, list[Kernel]] = {}
    for kernel in kernels:
        if (own := key(kernel)) is not None:
            groups.setdefault(own, []).append(kernel)
    return [some for some in groups.values() if len(some) > 1]


def _groups_of_equal_text(kernels: Iterable[Kernel]) -> dict[str, MergedBySizes]:
    texts = {kernel.name: _text_split_at_numbers(kernel) for kernel in kernels}
    groups = _groups_by_key(kernels, lambda kernel: texts[kernel.name].words)
    return {name: sized for some in groups for name, sized in _kernel_of_equal_texts(some, texts).items()}


def _text_key_of_kernel(kernel: Kernel) -> tuple:
    """Return a key that is equal for kernels with equal texts, and cheap to compare."""
    arrays = tuple((b.dtype, len(b.shape)) for b in (*kernel.inputs, *kernel.outputs))
    return arrays, len(kernel.inputs), kernel.aliases, tuple(type(s) for s in walk(kernel.body))


# --- which kernels, and which of their numbers stay --------------------------------


class _ArrayFlattener(InlinedKernelRenamer):
    """Rewriter that replaces buffers by flat ones; loops stay."""

    def stmt(self, s: Stmt) -> Stmt:
        return replace(s, body=self.renamed_block(s.body)) if isinstance(s, For) else super().renamed_statement(s)


def _with_flat_arrays(kernel: Kernel) -> Kernel:
    """Return ``kernel`` with arrays flattened to one axis where that saves integer divisions."""
    before: Counter[str] = Counter()
    after: Counter[str] = Counter()
    items = _grid_items_of_kernel(kernel)
    for s in walk(kernel.body):
        for place in (*loads_and_indices(statement_scalars(s)), *([s] if isinstance(s, Store) else ())):
            if not isinstance(place, Index) and len(place.index) > 1 and place.buffer.space == "global":
                divided = sum(len(_divisors_in_iteration(e, items)) for e in place.index)
                if divided:
                    before[place.buffer.name] += divided
                    after[place.buffer.name] += len(
                        _divisors_in_iteration(linearize(place.index, place.buffer.shape), items)
                    )
    flat = {
        b.name: replace(b, shape=(product(b.shape),))
        for b in (*kernel.inputs, *kernel.outputs)
        if after[b.name] < before[b.name]
    }
    if not flat:
        return kernel
    inputs, outputs = (tuple(flat.get(b.name, b) for b in side) for side in (kernel.inputs, kernel.outputs))
    return replace(
        kernel, inputs=inputs, outputs=outputs, body=_ArrayFlattener(flat, set(), "").renamed_block(kernel.body)
    )


# Rows of a tile. With more, the strides and the terms of its operands may be kernel arguments. With no more, memory
# bandwidth bounds the tile, and its steps are prefetched. AVX-512, 11 to 14 rows of 32 columns, 32 to 256 terms, time
# relative to constants: 0.98 to 1.03, on average 1.01.
TILE_ROWS = 4


def _numbers_that_must_be_equal(kernel: Kernel, matrices: Collection[str]) -> tuple | None:
    """Return the numbers of ``kernel`` that must be equal in all merged kernels, or None if it cannot be merged."""
    if kernel.dims or kernel.tiling is not None:
        return None
    numbers: list[object] = []
    items = _grid_items_of_kernel(kernel)
    for s in walk(kernel.body):
        match s:
            case For(kind="serial" | "parallel", step=1):
                numbers += [] if _is_innermost_loop(s) else _numbers_of_rows(s, any(s is x for x in kernel.body))
            case Store(reduce="") | Let() | If():
                pass
            case Alloc(buffer=buffer) if buffer.space == "private":
                numbers.append(buffer.shape)
            case Tile(rows=rows) if rows > TILE_ROWS:
                numbers += [rows, s.cols, s.out_base, s.out_row, s.form, s.a_inner]
                numbers += [s.levels] if s.form.dot_product_dtype in matrices else []
            case _:
                return None
        for e in statement_index_exprs(s):
            numbers += _divisors_in_iteration(e, items)
    return tuple(numbers)


def _numbers_of_rows(loop: For, alone: bool) -> list[object]:
    """Return the numbers of an innermost loop that must be equal in merged kernels.

    ``alone`` is True if the loop is not inside another loop. Its bounds must be equal unless it consists of whole
    vectors (more than one, inside another loop). For an array read at several indices, as by a window, the sizes of
    rows must be equal: distances of rows are immediate operands of instructions, and would occupy registers otherwise.
    """
    inside = list(walk(loop.body))
    read = [x for s in inside for x in loads_and_indices(statement_scalars(s)) if isinstance(x, Load)]
    count = Counter(name for name, _ in {(x.buffer.name, x.index) for x in read})
    several = loop.end != _widest_stored_vector(loop) and any(n > 1 for n in count.values())
    rows = dict.fromkeys((x.buffer.name, x.buffer.shape[1:]) for x in read if count[x.buffer.name] > 1)
    return [
        *(rows if several else ()),
        *([loop.begin, loop.end] if several or not _has_whole_vectors(loop, alone) else []),
    ]


def _has_whole_vectors(loop: For, alone: bool) -> bool:
    """Return True if a loop has a static number of whole vectors, several unless it is ``alone``."""
    vector = _widest_stored_vector(loop)
    if not vector or loop.begin != 0 or not isinstance(loop.end, int) or loop.kind == "parallel":
        return False
    return loop.end % vector == 0 and (alone or loop.end > vector)


def _widest_stored_vector(loop: For) -> int:
    """Return the number of elements of the widest vector that an innermost loop stores."""
    sizes = [size_of(s.buffer.dtype) for s in walk(loop.body) if isinstance(s, Store)]
    return ALIGNMENT // min(sizes) if sizes else 0


def _divisors_in_iteration(e: Dim, items: set[str]) -> list[Dim]:
    """Return the divisors of ``e`` in each iteration of a loop: LLVM turns constants into multiplications."""
    divisions = [call for call in calls_in(e) if call.fn in ("//", "%")]
    return [call.b for call in divisions if not {s.name for s in symbols(call.a)} <= items]


def _grid_items_of_kernel(kernel: Kernel) -> set[str]:
    return {s.var for s in kernel.body if isinstance(s, For) and s.kind == "parallel"}


# --- one kernel of several ----------------------------------------------------------


def _kernel_of_equal_texts(kernels: Sequence[Kernel], texts: Mapping[str, CutText]) -> dict[str, MergedBySizes]:
    """Return the merged kernel of kernels that have the same text except for numbers."""
    loops = zip(*map(_innermost_loops, kernels), strict=True)
    varied = [len({loop.end for loop in some}) > 1 for some in loops]
    cut = [
        _text_split_at_numbers(_with_whole_vector_loops(k, varied)) if any(varied) else texts[k.name] for k in kernels
    ]
    words, rows = cut[0].words, [*zip(*(text.numbers for text in cut), strict=True)]
    sizes = _SizeArguments("size")
    written = {row: sizes.text_of_number(row) for row in sorted(set(rows), key=lambda row: (max(row), row))}
    if len(sizes.known) > MAX_DIMS or any(sizes.prefix in word for word in words):
        return {}
    text = "".join(x for word, row in zip(words, rows) for x in (word, written[row])) + words[-1]
    declared = "".join(f'{name}: "dim(lo={min(row)}, extent={max(row) + 1})", ' for name, row in sizes.known.items())
    general = parse_kernel(text.replace('grid: "', f'{declared}grid: "', 1))
    general = replace(general, name=kernels[0].name)
    return {
        k.name: MergedBySizes(general, tuple(row[n] for row in sizes.known.values())) for n, k in enumerate(kernels)
    }


def _innermost_loops(kernel: Kernel) -> list[For]:
    return [s for s in walk(kernel.body) if isinstance(s, For) and not _is_innermost_loop(s)]


def _is_innermost_loop(loop: For) -> bool:
    return any(isinstance(inner, For) for inner in walk(loop.body))


def _with_whole_vector_loops(kernel: Kernel, varied: Sequence[bool]) -> Kernel:
    """Return ``kernel`` with its ``varied`` innermost loops as loops over whole vectors, for LLVM."""
    left = iter(varied)

    def rewrite_loop(stmt: Stmt) -> Stmt:
        """Return ``stmt`` with its varied innermost loops as loops over vectors, around loops over lanes."""
        match stmt:
            case If(cond, then, otherwise):
                return If(cond, tuple(map(rewrite_loop, then)), tuple(map(rewrite_loop, otherwise)))
            case For(var=var, end=end) if not _is_innermost_loop(stmt):
                if not next(left):
                    return stmt
                vector, name = _widest_stored_vector(stmt), f"{var}_vector"
                iterations = static(end) // vector
                within = sym(var, 0, vector) + sym(name, 0, iterations) * vector
                return For(
                    name,
                    0,
                    iterations,
                    (For(var, 0, vector, substitute_loop_values(stmt.body, {var: within}, "")),),
                    stmt.kind,
                )
            case For():
                return replace(stmt, body=tuple(map(rewrite_loop, stmt.body)))
        return stmt

    return replace(kernel, body=tuple(map(rewrite_loop, kernel.body)))


_CONSTANT = rf"""(?:{"|".join(DTYPES)})\((?:[^()]|\([^()]*\))*\)"""
_NUMBER = re.compile(rf"""aliases: "[^"]*"|lo=-?\d+|{_CONSTANT}|[A-Za-z_]\w*|(\d+)""")


def _text_split_at_numbers(kernel: Kernel) -> CutText:
    """Return the text of a kernel, split at its numbers: those of indices, extents and estimates."""
    text = print_kernel(replace(kernel, name="kernel"))
    words, numbers, begin = [], [], 0
    for match in _NUMBER.finditer(text):
        if match[1]:
            words.append(text[begin : match.start()])
            numbers.append(int(match[1]))
            begin = match.end()
    return CutText((*words, text[begin:]), tuple(numbers))


# Elements of the widest vector of f32. Where sizes are arguments, multiples of it are written as multiples, so that
# LLVM sees rows of whole vectors.
VECTOR_ELEMENTS = 16


@dataclass(slots=True)
class _SizeArguments:
    """Size arguments of a merged kernel, by name, with their value in each original kernel."""

    prefix: str
    known: dict[str, Row] = field(default_factory=dict)

    def text_of_number(self, row: Row) -> str:
        """Return the text of a number in a merged kernel: a constant, or an expression of size arguments."""
        if len(set(row)) == 1:
            return str(row[0])
        whole = gcd(*row)
        for name, other in self.known.items():
            times, more = _factor_and_offset(row, other) or (0, 0)
            if times and (more == 0 or whole % VECTOR_ELEMENTS):  # LLVM must see multiples of vectors
                part = f"({name} {'+' if more > 0 else '-'} {abs(more)})" if more else name
                return f"({times}*{part})" if times > 1 else part
        for first, one in self.known.items():
            for second, two in self.known.items():
                both = tuple(a * b for a, b in zip(one, two))
                if 0 not in both and (times := _common_factor(row, both)):
                    return f"({times}*{first}*{second})"
        name = f"{self.prefix}{len(self.known)}"
        self.known[name] = tuple(n // whole for n in row)
        return f"({whole}*{name})" if whole > 1 else name


# Elements. A size may be written as another size plus or minus this many, as padding makes it. A larger difference is
# coincidence.
MOST_BESIDE = 4


def _factor_and_offset(row: Row, other: Row) -> tuple[int, int] | None:
    """Return small ``a`` and ``b`` such that ``row`` is ``a * (other + b)``, or None."""
    n = next(n for n in range(len(other)) if other[n] != other[0])
    times, rest = divmod(row[n] - row[0], other[n] - other[0])
    if rest or times < 1 or row[0] % times:
        return None
    more = row[0] // times - other[0]
    right = abs(more) <= MOST_BESIDE and all(x == times * (y + more) for x, y in zip(row, other))
    return (times, more) if right else None


def _common_factor(row: Row, other: Row) -> int:
    """Return the ratio of two numbers if it is the same integer in all merged kernels, else 0."""
    ratios = {divmod(a, b) for a, b in zip(row, other)}
    times, rest = ratios.pop()
    return times if not ratios and not rest else 0
