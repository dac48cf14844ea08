"""The function of a Fourier transform for a CPU, as LLVM IR of whole vectors, which no pass need see.

Stockham's form sorts itself: pass by pass ``y[p, k, q] = w**(p k) * sum_j x[j, p, q] * root**(j k)``, where ``q`` runs
over what earlier passes have made and over neighbouring signals. Between passes real and imaginary parts lie apart.
A vector holds neighbouring ``q``; if these are few, those of several ``p``, and in the first pass of one signal
neighbouring ``p``. What is left at the end of a loop is a whole vector too, of which some has been done before; a
vector that is longer than what it holds spills over what is written next.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from aotc.ir.limits import TRANSFORM_LANES
from aotc.ir.loop_ir import Apply, Const, Scalar, Var
from aotc.ir.products.butterflies import Butterfly, Pair
from aotc.ir.products.transforms import FftStage, Transform, stages
from aotc.kernels.emit.vector_lines import VectorLines
from aotc.kernels.limits import HALF_REGISTER
from aotc.vmfb.dtypes import size_of

Values = list[str]
_PERMUTED = {"f32": "ps", "f64": "pd"}
AVX512_BYTES = 64


class TransformFunction:
    """The function of one transform, for vectors of so many bytes; ``str`` of it is its text."""

    def __init__(self, transform: Transform, vector_bytes: int, permutes: bool = False) -> None:
        digest = hashlib.sha256(f"{transform} {vector_bytes} {permutes}".encode()).hexdigest()[:12]
        self.name, self.transform, self.permutes = f"dft_{digest}", transform, permutes
        self.lanes = min(vector_bytes // size_of(transform.dtype), TRANSFORM_LANES)

    def __str__(self) -> str:
        return _TransformWriter(self).text()


def _floor(n: int) -> int:
    """Return the greatest power of two that is at most ``n``."""
    return 1 << n.bit_length() - 1


def _is_power(radix: int) -> bool:
    """Is a radix one of two, four, eight? Others leave no register free, or have less to do than a jump takes."""
    return radix & (radix - 1) == 0


def _ceil(n: int) -> int:
    """Return the least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class _Walk:
    """How a pass goes over what it reads.

    Vectors of so many lanes, ``step`` apart, of each of ``outer`` parts, which have ``end`` elements; ``groups`` says how
    many ``p`` a vector holds, 0 that it holds ``q`` of one.
    """

    groups: int
    lanes: int
    outer: int
    end: int
    step: int


class _TransformWriter(VectorLines):
    """Writes the passes of a function."""

    def __init__(self, function: TransformFunction) -> None:
        super().__init__(function.transform.dtype)
        self.t, self.name, self.most, self.lanes = function.transform, function.name, function.lanes, 1
        self.butterfly = Butterfly(self._bind, self.t.dtype, 1 if self.t.inverse else -1)
        self.strides: dict[int, str | int] = {}
        self.whole, self.permutes = 0, function.permutes
        self.orders: dict[tuple[str, ...], str] = {}
        self.loaded: dict[tuple[str, ...], str] = {}
        self.begun, self.outside = 0, 0

    def text(self) -> str:
        """Return the function."""
        t = self.t
        arrays = ["ptr noalias readonly %x", "ptr noalias readonly %table", "ptr noalias %out"]
        arrays += ["ptr noalias %work"] if t.work else []
        numbers = [name for name, known in (("width", t.width), ("stride", t.stride)) if t.pitch and not known]
        for name in numbers:
            self.entry.append(f"%{name} = load i64, ptr %at_{name}")
        self.width: str | int = t.width or "%width"
        self.tail = bool(t.pitch) and t.width != t.pitch
        passes = stages(t.radices)
        self.row = passes[-1].table + (t.points + 1 if t.real else 0)
        for together in self._shared(passes):
            self._before_loops(together[0].radix)
            if len(together) == 1:
                self._enter(len(passes))
                self._pass(together[0])
            else:
                self._several(together, len(passes))
        if t.real:
            self.lanes = min(_floor(t.points + 1), self.most)
            self._closed()
            self._before_loops(passes[-1].radix)
            self._loop(t.points + 1, self.lanes, lambda k: self._unpacked(passes[-1].table, k))
        parameters = ", ".join([*arrays, *(f"ptr noalias readonly %at_{name}" for name in numbers)])
        head = f'define linkonce_odr void @"{self.name}"({parameters}) noinline nounwind {{\nentry:'
        return "\n".join([*sorted(self.declared), *self._order_texts(), head, *self.entry, *self.lines, "ret void\n}\n"])

    # --- passes ---

    def _pass(self, stage: FftStage) -> None:
        if self.t.pitch:
            self._beside(stage)
        elif stage.s == 1:
            self.lanes = min(_floor(stage.m), self.most)
            self._loop(stage.m, self.lanes, lambda t: self._first(stage, t))
        else:
            walk = self._walk(stage)
            self.lanes = walk.lanes
            self._loop(walk.outer, 1, lambda o: self._loop(walk.end, walk.step, lambda at: self._turn(stage, walk, o, at)))

    def _enter(self, number_of_passes: int) -> None:
        """Begin the next pass: from which planes it reads, and which it writes."""
        number, plane = self.begun, self.t.plane
        self.first, self.last = number == 0, number == number_of_passes - 1
        self.source, self.target = (number - 1) % 2 * 2 * plane, number % 2 * 2 * plane
        self.begun += 1

    def _walk(self, stage: FftStage) -> _Walk:
        """Return how a pass goes over what it reads: several ``p`` at a time, if few ``q`` lie side by side."""
        s, m = stage.s, stage.m
        if m > 1 and self.most // s > 1:
            groups = min(self.most // s, m)
            return _Walk(groups, _ceil(groups * s), 1, m * s, groups * s)
        lanes = min((_floor if m == 1 else _ceil)(s), self.most)
        return _Walk(0, lanes, m, s, lanes)

    def _shared(self, passes: list[FftStage]) -> list[list[FftStage]]:
        """Return passes, those together that follow each other and do the same but for where they write and with what."""
        found = [passes[:1]]
        for before, stage in pairwise(passes):
            alike = stage.radix == before.radix and _is_power(stage.radix) and not self.t.pitch and before.s > 1
            if alike and self._walk(stage).lanes == self._walk(before).lanes:
                found[-1].append(stage)
            else:
                found.append([stage])
        return found

    def _several(self, together: list[FftStage], number_of_passes: int) -> None:
        """Write several passes with one butterfly: what is read and what is written are the same places of each."""
        walks = list(map(self._walk, together))
        self.loops += 1
        name, before = f"l{self.loops}", self.block
        self.lanes = walks[0].lanes
        sources = [(self.begun + n - 1) % 2 * 2 * self.t.plane for n in range(len(walks))]
        columns = {
            "pass": list(range(len(walks))), "from": sources, "outer": [w.outer for w in walks], "run": [w.end for w in walks],
            "step": [w.step for w in walks], "last": [w.end - w.step for w in walks],
        }
        enters = [before, *(f"{name}_enter{n}" for n in range(1, len(walks)))]
        self._begin(name)
        for column, values in columns.items():
            edges = ", ".join(f"[ {value}, %{enter} ]" for value, enter in zip(values, enters, strict=True))
            self.lines.append(f"%{name}_{column} = phi i64 {edges}")
        self._begin(f"{name}_o")
        self.lines.append(f"%{name}_p = phi i64 [ 0, %{name} ], [ %{name}_pn, %{name}_oend ]")
        begin = self._line(f"mul i64 %{name}_p, %{name}_run")
        begin = self._line(f"add i64 {begin}, %{name}_from")
        self._begin(f"{name}_u")
        self.lines.append(f"%{name}_q = phi i64 [ 0, %{name}_o ], [ %{name}_qn, %{name}_uend ]")
        at = f"%{name}_q"
        if any(w.end % w.step for w in walks):
            self.declared.add("declare i64 @llvm.umin.i64(i64, i64)")
            at = self._line(f"call i64 @llvm.umin.i64(i64 {at}, i64 %{name}_last)")
        place = self._line(f"add i64 {begin}, {at}")
        self.source = 0
        results = self.butterfly.transform(self._planes(together[0], place))
        tails = [f"{name}_tail{n}" for n in range(len(walks))]
        cases = " ".join(f"i64 {n}, label %{tail}" for n, tail in enumerate(tails[:-1]))
        self.lines.append(f"switch i64 %{name}_pass, label %{tails[-1]} [{cases}]")
        for stage, walk, tail in zip(together, walks, tails, strict=True):
            self._enter(number_of_passes)
            self.lines.append(f"{tail}:")
            self._finish(stage, walk, results, f"%{name}_p", at)
            self.lines.append(f"br label %{name}_uend")
        self.lines += [
            f"{name}_uend:", f"%{name}_qn = add i64 %{name}_q, %{name}_step",
            f"%{name}_qm = icmp ult i64 %{name}_qn, %{name}_run", f"br i1 %{name}_qm, label %{name}_u, label %{name}_oend",
            f"{name}_oend:", f"%{name}_pn = add i64 %{name}_p, 1", f"%{name}_pm = icmp ult i64 %{name}_pn, %{name}_outer",
            f"br i1 %{name}_pm, label %{name}_o, label %{name}_end", f"{name}_end:",
        ]
        self.block = f"{name}_after"
        cases = " ".join(f"i64 {n - 1}, label %{enters[n]}" for n in range(1, len(walks)))
        self.lines.append(f"switch i64 %{name}_pass, label %{self.block} [{cases}]")
        for enter in enters[1:]:
            self.lines += [f"{enter}:", f"br label %{name}"]
        self.lines.append(f"{self.block}:")

    def _first(self, stage: FftStage, t: str) -> None:
        """Take neighbouring ``p`` of a signal: what belongs to one of them is written side by side."""
        base = self._address("%x", self._sum((t, 2)), 0)
        read = [self._parted(self._load(2 * self.lanes, base, 2 * stage.m * j)) for j in range(stage.radix)]
        results = self._turned(stage, read, lambda k: self._twiddles(stage, k, t, self.lanes))
        if self.last:
            for k, value in enumerate(results):
                self._write("0", k, value)
            return
        at = self._sum((t, stage.radix))
        for plane, part in enumerate(zip(*results, strict=True)):
            base = self._address("%work", at, self.target + plane * self.t.plane)
            lanes, vectors = self._woven(list(part))
            for number, vector in enumerate(vectors):
                self._store(vector, lanes, base, number * lanes)

    def _turn(self, stage: FftStage, walk: _Walk, outer: str, at: str) -> None:
        """Take the elements from ``at`` on of part ``outer``."""
        read = self._planes(stage, self._sum((outer, walk.end), (at, 1)))
        self._finish(stage, walk, self.butterfly.transform(read), outer, at)

    def _finish(self, stage: FftStage, walk: _Walk, results: list[Pair], outer: str, at: str) -> None:
        """Multiply what a butterfly made, and write it."""
        if walk.groups:
            t = at if at == "0" else self._line(f"udiv exact i64 {at}, {stage.s}")
            self._groups(stage, walk.groups, results, t)
        else:
            self._runs(stage, results, outer, at)

    def _groups(self, stage: FftStage, groups: int, results: list[Pair], t: str) -> None:
        """Take the ``q`` of several neighbouring ``p``, which lie side by side."""
        each = [str(c) for c in range(groups) for _ in range(stage.s)]
        each += ["poison"] * (self.lanes - len(each))

        def twiddle(k: int) -> Pair:
            both = self._twiddles(stage, k, t, groups)
            re, im = (Var(self._shuffle(_name(part), "poison", groups, each), self.t.dtype) for part in both)
            return re, im

        results = self._times(stage, results, twiddle)
        lanes = _ceil(stage.s)
        for c in range(groups):
            at = self._sum((t, stage.s * stage.radix))
            offset = c * stage.s * stage.radix
            picked = range(c * stage.s, c * stage.s + lanes)
            for plane in (0, 1):
                base = self._address("%work", at, self.target + plane * self.t.plane + offset)
                for k, value in enumerate(results):
                    mask = [str(p) if p < self.lanes else "poison" for p in picked]
                    part = self._shuffle(_name(value[plane]), "poison", self.lanes, mask)
                    self._store(part, lanes, base, k * stage.s)

    def _runs(self, stage: FftStage, results: list[Pair], t: str, q: str) -> None:
        """Take neighbouring ``q`` of one ``p``."""
        results = self._times(stage, results, lambda k: self._splat_twiddle(stage, k, t))
        if self.last:
            for k, value in enumerate(results):
                self._write(q, stage.s * k, value)
            return
        self._write_planes(self._sum((t, stage.s * stage.radix), (q, 1)), stage.s, results)

    def _beside(self, stage: FftStage) -> None:
        """Take equal points of neighbouring signals."""
        pitch = self.t.pitch
        self.lanes = min(pitch, self.most)
        if self.first or self.last:
            outer = stage.m if self.first else stage.s
            self._loop(outer, 1, lambda o: self._loop(pitch, self.lanes, lambda v: self._end(stage, o, v)))
            return
        run = stage.s * pitch

        def inner(t: str, q: str) -> None:
            read = self._planes(stage, self._sum((t, run), (q, 1)), pitch)
            results = self._turned(stage, read, lambda k: self._splat_twiddle(stage, k, t))
            self._write_planes(self._sum((t, run * stage.radix), (q, 1)), run, results)

        self._loop(stage.m, 1, lambda t: self._loop(run, self.lanes, lambda q: inner(t, q)))

    def _end(self, stage: FftStage, outer: str, v: str) -> None:
        """Do the first pass of neighbouring signals or the last: ``outer`` is ``p`` or ``q``."""
        pitch = self.t.pitch
        mask = self._mask(v) if self.tail else ""
        if self.first:
            read = [self._complex_beside(outer, stage.m * j, v, mask) for j in range(stage.radix)]
        else:
            read = self._planes(stage, self._sum((outer, pitch), (v, 1)), pitch)
        results = self._turned(stage, read, lambda k: self._splat_twiddle(stage, k, outer))
        if not self.last:
            self._write_planes(self._sum((outer, stage.radix * pitch), (v, 1)), pitch, results)
            return
        for k, value in enumerate(results):
            place = self._beside_address("%out", outer, stage.s * k, v)
            self._store(self._joined(value), 2 * self.lanes, place, 0, mask)

    def _closed(self) -> None:
        """Put the first result behind the last one, too: a spectrum is periodic."""
        for plane in (0, 1):
            base = self._address("%work", "0", self.target + plane * self.t.plane)
            self._store(self._load(1, base, 0), 1, base, self.t.points)

    def _unpacked(self, table: int, k: str) -> None:
        """Write neighbouring points, from ``k`` on, of the spectrum of real numbers.

        The transform of pairs is that of the even numbers plus ``i`` times that of the odd ones; both are those of real
        numbers, whose points at ``k`` and at the end less ``k`` are conjugate.
        """
        make, dtype, lanes = self.butterfly, self.t.dtype, self.lanes
        back = self._line(f"sub i64 {self.t.points - lanes + 1}, {k}")
        mirror = [str(n) for n in reversed(range(lanes))]
        here, there, turns = [], [], []
        for plane in (0, 1):
            begin = self.target + plane * self.t.plane
            here.append(Var(self._load(lanes, self._address("%work", k, begin), 0), dtype))
            other = self._load(lanes, self._address("%work", back, begin), 0)
            there.append(Var(self._shuffle(other, "poison", lanes, mirror), dtype))
            turns.append(Var(self._load(lanes, self._address("%table", k, table + plane * self.row), 0), dtype))
        mirrored = (there[0], self._bind(Apply("neg", (there[1],), dtype)))
        both = make.scale(make.add((here[0], here[1]), mirrored), 0.5)
        apart = make.times(make.sub((here[0], here[1]), mirrored), (turns[0], turns[1]))
        self._write_complex(k, 0, make.add(both, apart))

    def _turned(self, stage: FftStage, read: list[Pair], twiddle: Callable[[int], Pair]) -> list[Pair]:
        """Return what a butterfly makes, times the factors that the next pass wants."""
        return self._times(stage, self.butterfly.transform(read), twiddle)

    def _times(self, stage: FftStage, results: list[Pair], twiddle: Callable[[int], Pair]) -> list[Pair]:
        """Return results times the factors that the next pass wants: none behind the last one."""
        if stage.m == 1:
            return results
        return [results[0], *(self.butterfly.times(x, twiddle(k)) for k, x in enumerate(results[1:], 1))]

    # --- memory ---

    def _planes(self, stage: FftStage, at: str, pitch: int = 1) -> list[Pair]:
        bases = [self._address("%work", at, self.source + plane * self.t.plane) for plane in (0, 1)]
        step = self.t.points // stage.radix * pitch

        def pair(offset: int) -> Pair:
            re, im = (Var(self._load(self.lanes, base, offset), self.t.dtype) for base in bases)
            return re, im

        return [pair(j * step) for j in range(stage.radix)]

    def _write_planes(self, at: str, step: int, results: list[Pair]) -> None:
        for plane in (0, 1):
            base = self._address("%work", at, self.target + plane * self.t.plane)
            for k, value in enumerate(results):
                self._store(_name(value[plane]), self.lanes, base, k * step)

    def _complex_beside(self, outer: str, offset: int, v: str, mask: str) -> Pair:
        return self._parted(self._load(2 * self.lanes, self._beside_address("%x", outer, offset, v), 0, mask))

    def _write(self, at: str, offset: int, value: Pair) -> None:
        """Write neighbouring results of the last pass."""
        if self.t.real:
            for plane in (0, 1):
                base = self._address("%work", at, self.target + plane * self.t.plane + offset)
                self._store(_name(value[plane]), self.lanes, base, 0)
            return
        self._write_complex(at, offset, value)

    def _write_complex(self, at: str, offset: int, value: Pair) -> None:
        self._store(self._joined(value), 2 * self.lanes, self._address("%out", self._sum((at, 2)), 2 * offset), 0)

    def _beside_address(self, array: str, outer: str, offset: int, v: str) -> str:
        """Return where point ``outer + offset`` of the signals from ``v`` on lies."""
        if self.t.stride:
            return self._address(array, self._sum((outer, 2 * self.t.stride), (v, 2)), 2 * self.t.stride * offset)
        if 1 not in self.strides:
            self.entry.append("%apart = shl i64 %stride, 1")
        self.strides[1] = "%apart"
        if offset not in self.strides:
            self.strides[offset] = f"%apart{offset}"
            self.entry.append(f"%apart{offset} = mul i64 %apart, {offset}")
        moved = self._line(f"mul i64 {outer}, %apart")
        return self._address(array, self._sum((moved, 1), (str(self.strides[offset]), 1), (v, 2)), 0)

    def _twiddles(self, stage: FftStage, k: int, t: str, lanes: int) -> Pair:
        """Return the factors of output ``k`` for neighbouring ``p`` from ``t`` on."""
        bases = [self._address("%table", t, stage.table + (k - 1) * stage.m + plane * self.row) for plane in (0, 1)]
        re, im = (Var(self._load(lanes, base, 0), self.t.dtype) for base in bases)
        return re, im

    def _splat_twiddle(self, stage: FftStage, k: int, t: str) -> Pair:
        zeros = ["0"] * self.lanes
        re, im = (self._shuffle(_name(part), "poison", 1, zeros) for part in self._twiddles(stage, k, t, 1))
        return Var(re, self.t.dtype), Var(im, self.t.dtype)

    def _mask(self, v: str) -> str:
        """Return which parts of numbers from signal ``v`` on there are."""
        lanes = 2 * self.lanes
        left = self._line(f"sub i64 {self.width}, {v}")
        twice = self._line(f"shl i64 {left}, 1")
        one = self._line(f"insertelement <{lanes} x i64> poison, i64 {twice}, i64 0")
        zeros = ", ".join(["i32 0"] * lanes)
        all_ = self._line(f"shufflevector <{lanes} x i64> {one}, <{lanes} x i64> poison, <{lanes} x i32> <{zeros}>")
        numbers = ", ".join(f"i64 {n}" for n in range(lanes))
        return self._line(f"icmp slt <{lanes} x i64> <{numbers}>, {all_}")

    # --- order ---

    def _shuffle(self, a: str, b: str, lanes: int, mask: Sequence[str]) -> str:
        """Put elements in another order.

        Of two AVX-512 registers one instruction takes any elements. It is named where LLVM would look long for others,
        and the order comes from memory, as it looks at one that it knows, too.
        """
        whole = self.whole
        if not whole or (lanes, len(mask)) not in ((whole, whole), (whole, 2 * whole), (2 * whole, whole)):
            return super()._shuffle(a, b, lanes, mask)
        if lanes == whole and (b == "poison" or list(mask) == list(map(str, range(2 * whole)))):
            return super()._shuffle(a, b, lanes, mask)
        if lanes > whole:
            first, second = (list(map(str, range(n, n + whole))) for n in (0, whole))
            a, b = super()._shuffle(a, b, lanes, first), super()._shuffle(a, b, lanes, second)
        if len(mask) == whole:
            return self._permuted(a, b, tuple(mask))
        both = [self._permuted(a, b, tuple(mask[n : n + whole])) for n in (0, whole)]
        return super()._shuffle(*both, whole, list(map(str, range(2 * whole))))

    def _permuted(self, a: str, b: str, order: tuple[str, ...]) -> str:
        lanes, integer = self.whole, f"i{8 * self.size}"
        kind, name = f"<{lanes} x {self.part}>", f"@llvm.x86.avx512.vpermi2var.{_PERMUTED[self.dtype]}.512"
        self.declared.add(f"declare {kind} {name}({kind}, <{lanes} x {integer}>, {kind})")
        if order not in self.loaded:
            constant = self.orders.setdefault(order, f'@"{self.name}_{len(self.orders)}"')
            self.loaded[order] = f"%order{self.outside}_{len(self.loaded)}"
            self.lines.insert(self.outside, f"{self.loaded[order]} = load <{lanes} x {integer}>, ptr {constant}")
        return self._line(f"call {kind} {name}({kind} {a}, <{lanes} x {integer}> {self.loaded[order]}, {kind} {b})")

    def _before_loops(self, radix: int) -> None:
        """Load orders here, before the loops of a pass: they have registers there, and leave them to other passes."""
        self.outside = len(self.lines)
        self.whole = AVX512_BYTES // self.size if self.permutes and _is_power(radix) else 0
        self.loaded.clear()

    def _order_texts(self) -> Iterator[str]:
        kind = f"i{8 * self.size}"
        for order, constant in self.orders.items():
            places = ", ".join(f"{kind} {n.replace('poison', '0')}" for n in order)
            yield f"{constant} = private constant <{len(order)} x {kind}> <{places}>"

    # --- values ---

    def _bind(self, value: Scalar) -> Scalar:
        """Write an operation on vectors."""
        assert isinstance(value, Apply)
        operands = ", ".join(self._operand(x) for x in value.args)
        return Var(self._line(f"f{value.fn} contract <{self.lanes} x {self.part}> {operands}"), value.dtype)

    def _operand(self, value: Scalar) -> str:
        if isinstance(value, Const):
            assert not isinstance(value.value, complex)
            return f"splat ({self.part} {_literal(value.value, self.t.dtype)})"
        return _name(value)

    def _parted(self, both: str) -> Pair:
        """Return real and imaginary parts of numbers."""
        lanes = 2 * self.lanes
        re, im = (self._shuffle(both, "poison", lanes, list(map(str, range(n, lanes, 2)))) for n in (0, 1))
        return Var(re, self.t.dtype), Var(im, self.t.dtype)

    def _joined(self, value: Pair) -> str:
        """Return the numbers of real and imaginary parts, times the scale."""
        if self.t.scale != 1:
            value = self.butterfly.scale(value, self.t.scale)
        order = chain.from_iterable((str(n), str(n + self.lanes)) for n in range(self.lanes))
        return self._shuffle(_name(value[0]), _name(value[1]), self.lanes, list(order))

    def _woven(self, values: list[Scalar]) -> tuple[int, Values]:
        """Return the vectors, of so many lanes, of the first elements of all, of their second ones, and so on."""
        vectors = list(map(_name, values))
        if len(vectors) & len(vectors) - 1 == 0:
            return self.lanes, self._halves_in_order(self._interleaved(vectors))
        lanes, number = self.lanes, len(vectors)
        while len(vectors) > 1:
            vectors += ["poison"] * (len(vectors) % 2)
            whole = list(map(str, range(2 * lanes)))
            vectors = [self._shuffle(a, b, lanes, whole) for a, b in zip(vectors[::2], vectors[1::2])]
            lanes *= 2
        order = [str(k * self.lanes + n) for n in range(self.lanes) for k in range(number)]
        return number * self.lanes, [self._shuffle(vectors[0], "poison", lanes, order)]

    @property
    def _run(self) -> int:
        """Return how many lanes are woven apart: halves of 32 bytes, between which moves are dear on x86."""
        return self.lanes // 2 if self.lanes * self.size == 2 * HALF_REGISTER else self.lanes

    def _interleaved(self, vectors: Values) -> Values:
        """Return two halves woven into each other, those of even and of odd numbers, run by run of their lanes."""
        if len(vectors) == 1:
            return vectors
        even, odd = self._interleaved(vectors[::2]), self._interleaved(vectors[1::2])
        run, half = self._run, self._run // 2
        found = []
        for a, b in zip(even, odd, strict=True):
            for begin in (0, half):
                places = (n + base for base in range(begin, self.lanes, run) for n in range(half))
                pairs = ((str(n), str(n + self.lanes)) for n in places)
                found.append(self._shuffle(a, b, self.lanes, list(chain.from_iterable(pairs))))
        return found

    def _halves_in_order(self, vectors: Values) -> Values:
        """Return first halves of all vectors, then second ones, if they are woven apart."""
        lanes, run = self.lanes, self._run
        if run == lanes:
            return vectors
        orders = [[str(n + base) for base in (half, lanes + half) for n in range(run)] for half in (0, run)]
        return [self._shuffle(a, b, lanes, order) for order in orders for a, b in zip(vectors[::2], vectors[1::2])]


def _name(value: Scalar) -> str:
    assert isinstance(value, Var)
    return value.name


def _literal(value: float, dtype: str) -> str:
    """Return a number as LLVM reads it: the bits of a double, of a float's value too."""
    if dtype == "f32":
        (value,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
