"""Writers of vector code as LLVM assembly, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from aotc.kernels.limits import HALF_REGISTER
from aotc.kernels.symbol_table import declaration_text
from aotc.vmfb.dtypes import size_of

_LLVM = {"f32": "float", "f64": "double", "i8": "i8", "i16": "i16"}
_PERMUTED = {"f32": "ps", "f64": "pd"}

Values = list[str]


class VectorLines:
    """Writer of the assembly lines of a function on vectors of one element type.

    Values are names of registers or literals; offsets in memory are in elements. ``symbols`` has the assembly of each
    function that the lines call and of each constant that they load.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype, self.part, self.size = dtype, _LLVM[dtype], size_of(dtype)
        self.entry: list[str] = []
        self.lines: list[str] = []
        self.symbols: dict[str, str] = {}
        self.count, self.loops, self.block = 0, 0, "entry"

    def _declare_called_function(self, name: str, result: str, *parameters: str) -> str:
        """Declare a function that the lines call; return its name in LLVM's syntax."""
        self.symbols[name] = declaration_text(name, result, parameters)
        return f"@{name}"

    def _umin(self) -> str:
        return self._declare_called_function("llvm.umin.i64", "i64", "i64", "i64")

    def _append_text_line(self, what: str) -> str:
        """Append an instruction; return the register of its result."""
        self.count += 1
        self.lines.append(f"%v{self.count} = {what}")
        return f"%v{self.count}"

    def _sum_of_terms(self, *terms: tuple[str, int]) -> str:
        """Append instructions for a sum of products; a term is a value and an integer factor."""
        total = ""
        for value, factor in terms:
            if value == "0":
                continue
            product = value if factor == 1 else self._append_text_line(f"mul i64 {value}, {factor}")
            total = self._append_text_line(f"add i64 {total}, {product}") if total else product
        return total or "0"

    def _address_of_offset(self, array: str, at: str, offset: int) -> str:
        """Append the address of element ``at + offset`` of an array."""
        base = array if at == "0" else self._append_text_line(f"getelementptr {self.part}, ptr {array}, i64 {at}")
        return self._append_text_line(f"getelementptr {self.part}, ptr {base}, i64 {offset}") if offset else base

    def _load_vector(self, lanes: int, base: str, offset: int, mask: str = "") -> str:
        """Append the load of a vector; lanes outside of ``mask`` are 0."""
        place, kind = self._address_of_offset(base, "0", offset), f"<{lanes} x {self.part}>"
        if not mask:
            return self._append_text_line(f"load {kind}, ptr {place}, align {self.size}")
        name = self._declare_called_function(
            f"llvm.masked.load.v{lanes}{self.dtype}.p0", kind, "ptr", "i32", f"<{lanes} x i1>", kind
        )
        return self._append_text_line(
            f"call {kind} {name}(ptr {place}, i32 {self.size}, <{lanes} x i1> {mask}, {kind} zeroinitializer)"
        )

    def _store_vector(self, value: str, lanes: int, base: str, offset: int, mask: str = "") -> None:
        """Append the store of a vector; lanes outside of ``mask`` are not written."""
        place, kind = self._address_of_offset(base, "0", offset), f"<{lanes} x {self.part}>"
        if not mask:
            self.lines.append(f"store {kind} {value}, ptr {place}, align {self.size}")
            return
        name = self._declare_called_function(
            f"llvm.masked.store.v{lanes}{self.dtype}.p0", "void", kind, "ptr", "i32", f"<{lanes} x i1>"
        )
        self.lines.append(f"call void {name}({kind} {value}, ptr {place}, i32 {self.size}, <{lanes} x i1> {mask})")

    def _shuffle_vectors(self, a: str, b: str, lanes: int, mask: Sequence[str]) -> str:
        kind, picked = f"<{lanes} x {self.part}>", ", ".join(f"i32 {n}" for n in mask)
        return self._append_text_line(f"shufflevector {kind} {a}, {kind} {b}, <{len(mask)} x i32> <{picked}>")

    def _write_loop(self, end: int, step: int, body: Callable[[str], None]) -> None:
        """Append a loop over ``0, step, ...`` whose last iteration ends at ``end``.

        ``body`` appends an iteration, given its start. If ``step >= end`` there is one iteration.
        """
        iterations = -(-end // step)
        if iterations <= 1:
            body("0")
            return
        self.loops += 1
        name, before = f"l{self.loops}", self.block
        self._begin_text_block(name)
        self.lines.append(f"%{name}_at = phi i64 [ 0, %{before} ], [ %{name}_next, %{name}_end ]")
        at = f"%{name}_at" if step == 1 else self._append_text_line(f"mul i64 %{name}_at, {step}")
        if end % step:
            at = self._append_text_line(f"call i64 {self._umin()}(i64 {at}, i64 {end - step})")
        body(at)
        self._begin_text_block(f"{name}_end")
        self.lines.append(f"%{name}_next = add i64 %{name}_at, 1")
        more = self._append_text_line(f"icmp ult i64 %{name}_next, {iterations}")
        self.block = f"{name}_after"
        self.lines += [f"br i1 {more}, label %{name}, label %{self.block}", f"{self.block}:"]

    def _begin_text_block(self, name: str) -> None:
        self.lines += [f"br label %{name}", f"{name}:"]
        self.block = name


# Bytes of an AVX-512 register. One instruction (vpermi2) selects any elements of two registers. Interleaving code names
# it directly, as LLVM searches long for alternatives. fft of c64 [4096]: 40 us less code generation for each of 80
# permutations.
AVX512_BYTES = 64


class OrderedLines(VectorLines):
    """Writer of the assembly lines of a function that permutes elements.

    One instruction of AVX-512 selects any elements of two registers, but LLVM searches long for better instructions.
    With ``permutes`` the code calls the instruction. The permutation is loaded from memory: LLVM would analyze a
    constant permutation.
    """

    def __init__(self, dtype: str, name: str, permutes: bool) -> None:
        super().__init__(dtype)
        self.name, self.permutes, self.lanes = name, permutes, 1
        self.whole, self.outside = 0, 0
        self.orders: dict[tuple[str, ...], str] = {}
        self.loaded: dict[tuple[str, ...], str] = {}

    def _load_permutations_before_loops(self, registers: bool) -> None:
        """Mark this position as that of the loads of permutations, if registers are free in the loops that follow.

        Otherwise the loops use plain shuffles.
        """
        self.outside, self.whole = len(self.lines), AVX512_BYTES // self.size if self.permutes and registers else 0
        self.loaded.clear()

    def _shuffle_vectors(self, a: str, b: str, lanes: int, mask: Sequence[str]) -> str:
        """Append a shuffle of two vectors; whole registers are shuffled by the permutation instruction."""
        whole, simple = self.whole, super()._shuffle_vectors
        one = lanes == whole and b == "poison"
        if not whole or one or (lanes, len(mask)) not in ((whole, whole), (whole, 2 * whole), (2 * whole, whole)):
            return simple(a, b, lanes, mask)
        halves = [list(map(str, range(n, n + whole))) for n in (0, whole)]
        if lanes > whole:
            a, b = (simple(a, "poison", lanes, half) for half in halves)
        if len(mask) == whole:
            return self._permute_lanes(a, b, tuple(mask))
        first, second = (self._permute_lanes(a, b, tuple(mask[n : n + whole])) for n in (0, whole))
        return simple(first, second, whole, halves[0] + halves[1])

    def _permute_lanes(self, a: str, b: str, order: tuple[str, ...]) -> str:
        """Append the permutation instruction on two registers."""
        kind, order_kind = f"<{self.whole} x {self.part}>", f"<{self.whole} x i{8 * self.size}>"
        name = f"llvm.x86.avx512.vpermi2var.{_PERMUTED[self.dtype]}.512"
        name = self._declare_called_function(name, kind, kind, order_kind, kind)
        if order not in self.loaded:
            constant = self._permutation_constant(order)
            self.loaded[order] = f"%order{self.outside}_{len(self.loaded)}"
            self.lines.insert(self.outside, f'{self.loaded[order]} = load {order_kind}, ptr @"{constant}"')
        return self._append_text_line(f"call {kind} {name}({kind} {a}, {order_kind} {self.loaded[order]}, {kind} {b})")

    def _permutation_constant(self, order: tuple[str, ...]) -> str:
        """Return the name of the constant with the lane numbers of a permutation."""
        if order not in self.orders:
            self.orders[order] = name = f"{self.name}_{len(self.orders)}"
            kind = f"i{8 * self.size}"
            elements = ", ".join(f"{kind} {n}" for n in order)
            self.symbols[name] = f'@"{name}" = private constant <{len(order)} x {kind}> <{elements}>'
        return self.orders[order]

    def _interleave_vectors(self, vectors: Values) -> tuple[int, Values]:
        """Append the interleaving of vectors: all first elements, then all second ones, and so on.

        Return the number of lanes of the results, and the results.
        """
        if len(vectors) & len(vectors) - 1 == 0:
            return self.lanes, self._halves_in_order(self._interleave_recursively(vectors))
        lanes, number = self.lanes, len(vectors)
        while len(vectors) > 1:
            vectors += ["poison"] * (len(vectors) % 2)
            whole = list(map(str, range(2 * lanes)))
            vectors = [self._shuffle_vectors(a, b, lanes, whole) for a, b in zip(vectors[::2], vectors[1::2])]
            lanes *= 2
        order = [str(k * self.lanes + n) for n in range(self.lanes) for k in range(number)]
        return number * self.lanes, [self._shuffle_vectors(vectors[0], "poison", lanes, order)]

    @property
    def _separately_interleaved_lanes(self) -> int:
        """Return the number of lanes that are interleaved separately.

        These are halves of 64 bytes, because x86 shuffles across 32 bytes are slow.
        """
        return self.lanes // 2 if self.lanes * self.size == 2 * HALF_REGISTER else self.lanes

    def _interleave_recursively(self, vectors: Values) -> Values:
        """Interleave the even and the odd vectors recursively, in separate runs of lanes."""
        if len(vectors) == 1:
            return vectors
        even, odd = self._interleave_recursively(vectors[::2]), self._interleave_recursively(vectors[1::2])
        run, half = self._separately_interleaved_lanes, self._separately_interleaved_lanes // 2
        found = []
        for a, b in zip(even, odd, strict=True):
            for begin in (0, half):
                places = (n + base for base in range(begin, self.lanes, run) for n in range(half))
                pairs = ((str(n), str(n + self.lanes)) for n in places)
                found.append(self._shuffle_vectors(a, b, self.lanes, list(chain.from_iterable(pairs))))
        return found

    def _halves_in_order(self, vectors: Values) -> Values:
        """Return the first halves of all vectors, then the second halves, if they were interleaved separately."""
        lanes, run = self.lanes, self._separately_interleaved_lanes
        if run == lanes:
            return vectors
        orders = [[str(n + base) for base in (half, lanes + half) for n in range(run)] for half in (0, run)]
        return [
            self._shuffle_vectors(a, b, lanes, order) for order in orders for a, b in zip(vectors[::2], vectors[1::2])
        ]
