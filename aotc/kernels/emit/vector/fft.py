"""Write the function of a Fourier transform for a CPU, as LLVM IR of whole vectors that bypasses LLVM's passes.

The algorithm is Stockham's autosort algorithm: pass by pass ``y[p, k, q] = w**(p k) * sum_j x[j, p, q] * root**(j k)``,
where ``q`` runs over the results of earlier passes and over neighbouring signals. Between passes real and imaginary
parts are in separate planes. A vector has neighbouring ``q``; if these are few, those of several ``p``; in the first
pass of a single signal, neighbouring ``p``. The remainder of a loop is a whole vector, too, which overlaps the one
before. A vector with more lanes than elements writes beyond them, and the next store overwrites the excess.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from itertools import chain

from aotc.ir.limits import TRANSFORM_LANES
from aotc.ir.loop.forms.butterflies import Butterfly, Pair
from aotc.ir.loop.forms.fft import FftStage, Transform, fft_stages
from aotc.ir.loop.ir import Apply, Const, Scalar, Var
from aotc.kernels.emit.vector.fft_passes import (
    PassIterationSpace,
    SharedPassLoop,
    butterfly_leaves_registers,
    ceil_power_of_two,
    floor_power_of_two,
    group_passes,
    iteration_space_of_pass,
)
from aotc.kernels.emit.vector.vector_text import OrderedLines
from aotc.vmfb.dtypes import size_of


class FftFunction:
    """The LLVM function of a Fourier transform, for vectors of ``vector_bytes`` bytes.

    ``permutes`` is True if the target has the permutation instructions of AVX-512.
    """

    def __init__(self, transform: Transform, vector_bytes: int, permutes: bool = False) -> None:
        digest = hashlib.sha256(f"{transform} {vector_bytes} {permutes}".encode()).hexdigest()[:12]
        self.name, self.transform, self.permutes = f"dft_{digest}", transform, permutes
        self.lanes = min(vector_bytes // size_of(transform.dtype), TRANSFORM_LANES)

    def symbols(self) -> dict[str, str]:
        """Return the assembly of the function, of its callees and of its constants, by symbol."""
        return _FftWriter(self).function_assembly()


class _FftWriter(OrderedLines):
    """Writer of the assembly of a transform's function, pass by pass."""

    def __init__(self, function: FftFunction) -> None:
        super().__init__(function.transform.dtype, function.name, function.permutes)
        self.t, self.most, self.begun = function.transform, function.lanes, 0
        self.butterfly = Butterfly(self._write_vector_operation, self.t.dtype, 1 if self.t.inverse else -1)
        self.strides: dict[int, str | int] = {}

    def function_assembly(self) -> dict[str, str]:
        """Return the assembly of the function, of its callees and of its constants, by symbol."""
        t = self.t
        arrays = ["ptr noalias readonly %x", "ptr noalias readonly %table", "ptr noalias %out"]
        arrays += ["ptr noalias %work"] if t.work else []
        numbers = [name for name, known in (("width", t.width), ("stride", t.stride)) if t.pitch and not known]
        for name in numbers:
            self.entry.append(f"%{name} = load i64, ptr %at_{name}")
        self.width: str | int = t.width or "%width"
        self.tail = bool(t.pitch) and t.width != t.pitch
        passes = fft_stages(t.radices)
        self.row = passes[-1].table + (t.points + 1 if t.real else 0)
        for together in group_passes(passes) if not t.pitch else [[stage] for stage in passes]:
            self._load_permutations_before_loops(butterfly_leaves_registers(together[0].radix))
            if len(together) > 1:
                self._write_passes_as_loop(together)
            else:
                self._begin_pass(together[0])
                self._write_pass(together[0])
        if t.real:
            self.lanes = min(floor_power_of_two(t.points + 1), self.most)
            self._copy_first_result_to_end()
            self._load_permutations_before_loops(butterfly_leaves_registers(passes[-1].radix))
            self._write_loop(t.points + 1, self.lanes, lambda k: self._unpack_real_spectrum(passes[-1].table, k))
        parameters = ", ".join([*arrays, *(f"ptr noalias readonly %at_{name}" for name in numbers)])
        head = f'define linkonce_odr void @"{self.name}"({parameters}) noinline nounwind {{\nentry:'
        return self.symbols | {self.name: "\n".join([head, *self.entry, *self.lines, "ret void\n}\n"])}

    # --- passes ---

    def _write_pass(self, stage: FftStage) -> None:
        """Write one pass, by its kind: over several signals, the first pass of a single signal, or a later pass."""
        if self.t.pitch:
            self._write_pass_over_signals(stage)
        elif stage.s == 1:
            self.lanes = min(floor_power_of_two(stage.m), self.most)
            self._write_loop(stage.m, self.lanes, lambda t: self._write_first_pass(stage, t))
        else:
            way = iteration_space_of_pass(stage, self.most)
            self.lanes = way.lanes
            self._write_loop(
                way.parts,
                1,
                lambda p: self._write_loop(way.run, way.step, lambda at: self._write_iteration(stage, way, p, at)),
            )

    def _begin_pass(self, stage: FftStage) -> None:
        """Start the next pass: select the planes that it reads and writes."""
        self.first, self.last = stage.s == 1, stage.m == 1
        self.source, self.target = self._plane_offset_of_pass(self.begun - 1), self._plane_offset_of_pass(self.begun)
        self.begun += 1

    def _plane_offset_of_pass(self, number: int) -> int:
        """Return the offset in the workspace, in elements, of the planes that pass ``number`` writes.

        Two buffers alternate.
        """
        return number % 2 * 2 * self.t.plane

    def _write_passes_as_loop(self, together: list[FftStage]) -> None:
        """Write several passes with the same butterfly as one loop over passes."""
        self.loops += 1
        ways = [iteration_space_of_pass(stage, self.most) for stage in together]
        sources = [self._plane_offset_of_pass(self.begun - 1 + n) for n in range(len(ways))]
        loop = SharedPassLoop(f"l{self.loops}", self.block, ways, sources)
        self.lanes, self.source = ways[0].lanes, 0
        self.lines += loop.begin_iteration()
        results = self.butterfly.transform(self._load_planes(together[0], loop.place))
        self.lines.append(loop.jump_to_store_code())
        for number, (stage, way) in enumerate(zip(together, ways, strict=True)):
            self._begin_pass(stage)
            self.lines.append(loop.store_code_label(number))
            self._write_iteration_end(stage, way, results, loop.part, loop.at)
            self.lines.append(loop.end_store_code())
        self.lines += loop.end_iteration()
        self.block = loop.after

    def _write_first_pass(self, stage: FftStage, t: str) -> None:
        """Write the first pass of a single signal.

        A vector has neighbouring ``p``; the results of a ``p`` are contiguous.
        """
        base = self._address_of_offset("%x", self._sum_of_terms((t, 2)), 0)
        read = [
            self._deinterleave_complex(self._load_vector(2 * self.lanes, base, 2 * stage.m * j))
            for j in range(stage.radix)
        ]
        results = self._butterfly_times_twiddles(stage, read, lambda k: self._load_twiddles(stage, k, t, self.lanes))
        if self.last:
            for k, value in enumerate(results):
                self._store_results("0", k, value)
            return
        at = self._sum_of_terms((t, stage.radix))
        for plane, part in enumerate(zip(*results, strict=True)):
            base = self._address_of_offset("%work", at, self.target + plane * self.t.plane)
            lanes, vectors = self._interleave_vectors(list(map(_value_name_text, part)))
            for number, vector in enumerate(vectors):
                self._store_vector(vector, lanes, base, number * lanes)

    def _write_iteration(self, stage: FftStage, way: PassIterationSpace, part: str, at: str) -> None:
        """Write an iteration of a pass: the vectors at offset ``at`` of the sub-transform ``part``."""
        read = self._load_planes(stage, self._sum_of_terms((part, way.run), (at, 1)))
        self._write_iteration_end(stage, way, self.butterfly.transform(read), part, at)

    def _write_iteration_end(
        self, stage: FftStage, way: PassIterationSpace, results: list[Pair], part: str, at: str
    ) -> None:
        """Write the end of an iteration: multiply the results of a butterfly by twiddle factors, and store them."""
        if way.groups:
            t = at if at == "0" else self._append_text_line(f"udiv exact i64 {at}, {stage.s}")
            self._store_result_groups(stage, way.groups, results, t)
        else:
            self._store_result_runs(stage, results, part, at)

    def _store_result_groups(self, stage: FftStage, groups: int, results: list[Pair], t: str) -> None:
        """Write the stores of results whose vectors have the contiguous ``q`` of several neighbouring ``p``."""
        each = [str(c) for c in range(groups) for _ in range(stage.s)]
        each += ["poison"] * (self.lanes - len(each))

        def group_twiddles(k: int) -> Pair:
            both = self._load_twiddles(stage, k, t, groups)
            re, im = (
                Var(self._shuffle_vectors(_value_name_text(part), "poison", groups, each), self.t.dtype)
                for part in both
            )
            return re, im

        results = self._multiply_by_twiddles(stage, results, group_twiddles)
        lanes = ceil_power_of_two(stage.s)
        for c in range(groups):
            at = self._sum_of_terms((t, stage.s * stage.radix))
            offset = c * stage.s * stage.radix
            picked = range(c * stage.s, c * stage.s + lanes)
            for plane in (0, 1):
                base = self._address_of_offset("%work", at, self.target + plane * self.t.plane + offset)
                for k, value in enumerate(results):
                    mask = [str(p) if p < self.lanes else "poison" for p in picked]
                    part = self._shuffle_vectors(_value_name_text(value[plane]), "poison", self.lanes, mask)
                    self._store_vector(part, lanes, base, k * stage.s)

    def _store_result_runs(self, stage: FftStage, results: list[Pair], t: str, q: str) -> None:
        """Write the twiddle products and stores of vectors along ``q``, with a single ``p``."""
        results = self._multiply_by_twiddles(stage, results, lambda k: self._splat_twiddle(stage, k, t))
        if self.last:
            for k, value in enumerate(results):
                self._store_results(q, stage.s * k, value)
            return
        self._write_planes(self._sum_of_terms((t, stage.s * stage.radix), (q, 1)), stage.s, results)

    def _write_pass_over_signals(self, stage: FftStage) -> None:
        """Write a pass over neighbouring signals; a vector has the same point of several signals."""
        pitch = self.t.pitch
        self.lanes = min(pitch, self.most)
        if self.first or self.last:
            outer = stage.m if self.first else stage.s
            self._write_loop(
                outer,
                1,
                lambda o: self._write_loop(pitch, self.lanes, lambda v: self._write_end_pass_over_signals(stage, o, v)),
            )
            return
        run = stage.s * pitch

        def write_inner_iteration(t: str, q: str) -> None:
            read = self._load_planes(stage, self._sum_of_terms((t, run), (q, 1)), pitch)
            results = self._butterfly_times_twiddles(stage, read, lambda k: self._splat_twiddle(stage, k, t))
            self._write_planes(self._sum_of_terms((t, run * stage.radix), (q, 1)), run, results)

        self._write_loop(stage.m, 1, lambda t: self._write_loop(run, self.lanes, lambda q: write_inner_iteration(t, q)))

    def _write_end_pass_over_signals(self, stage: FftStage, outer: str, v: str) -> None:
        """Write an iteration of the first or last pass over neighbouring signals; ``outer`` is ``p`` or ``q``."""
        pitch = self.t.pitch
        mask = self._signal_lane_mask(v) if self.tail else ""
        if self.first:
            read = [self._load_neighbours(outer, stage.m * j, v, mask) for j in range(stage.radix)]
        else:
            read = self._load_planes(stage, self._sum_of_terms((outer, pitch), (v, 1)), pitch)
        results = self._butterfly_times_twiddles(stage, read, lambda k: self._splat_twiddle(stage, k, outer))
        if not self.last:
            self._write_planes(self._sum_of_terms((outer, stage.radix * pitch), (v, 1)), pitch, results)
            return
        for k, value in enumerate(results):
            place = self._neighbour_address("%out", outer, stage.s * k, v)
            self._store_vector(self._interleave_complex(value), 2 * self.lanes, place, 0, mask)

    def _copy_first_result_to_end(self) -> None:
        """Write a copy of the first result behind the last, because a spectrum is periodic."""
        for plane in (0, 1):
            base = self._address_of_offset("%work", "0", self.target + plane * self.t.plane)
            self._store_vector(self._load_vector(1, base, 0), 1, base, self.t.points)

    def _unpack_real_spectrum(self, table: int, k: str) -> None:
        """Write the computation of neighbouring points, from ``k`` on, of the spectrum of a real signal.

        A real signal is transformed as complex pairs of half the length. The result is the transform of the even
        elements plus ``i`` times that of the odd elements. Both belong to real signals, so their points at ``k`` and
        ``points - k`` are conjugate, which separates them.
        """
        make, dtype, lanes = self.butterfly, self.t.dtype, self.lanes
        back = self._append_text_line(f"sub i64 {self.t.points - lanes + 1}, {k}")
        mirror = [str(n) for n in reversed(range(lanes))]
        here, there, rotation = [], [], []
        for plane in (0, 1):
            begin = self.target + plane * self.t.plane
            here.append(Var(self._load_vector(lanes, self._address_of_offset("%work", k, begin), 0), dtype))
            other = self._load_vector(lanes, self._address_of_offset("%work", back, begin), 0)
            there.append(Var(self._shuffle_vectors(other, "poison", lanes, mirror), dtype))
            rotation.append(
                Var(self._load_vector(lanes, self._address_of_offset("%table", k, table + plane * self.row), 0), dtype)
            )
        mirrored = (there[0], self._write_vector_operation(Apply("neg", (there[1],), dtype)))
        both = make.scale(make.add((here[0], here[1]), mirrored), 0.5)
        difference = make.times(make.sub((here[0], here[1]), mirrored), (rotation[0], rotation[1]))
        self._store_complex_results(k, 0, make.add(both, difference))

    def _butterfly_times_twiddles(
        self, stage: FftStage, read: list[Pair], twiddle: Callable[[int], Pair]
    ) -> list[Pair]:
        """Return the results of a butterfly times the twiddle factors of the next pass."""
        return self._multiply_by_twiddles(stage, self.butterfly.transform(read), twiddle)

    def _multiply_by_twiddles(self, stage: FftStage, results: list[Pair], twiddle: Callable[[int], Pair]) -> list[Pair]:
        """Return results times the twiddle factors of the next pass; the results of the last pass are unchanged."""
        if stage.m == 1:
            return results
        return [results[0], *(self.butterfly.times(x, twiddle(k)) for k, x in enumerate(results[1:], 1))]

    # --- memory ---

    def _load_planes(self, stage: FftStage, at: str, pitch: int = 1) -> list[Pair]:
        """Load the operands of a butterfly from the planes of the previous pass."""
        bases = [self._address_of_offset("%work", at, self.source + plane * self.t.plane) for plane in (0, 1)]
        step = self.t.points // stage.radix * pitch

        def load_complex(offset: int) -> Pair:
            re, im = (Var(self._load_vector(self.lanes, base, offset), self.t.dtype) for base in bases)
            return re, im

        return [load_complex(j * step) for j in range(stage.radix)]

    def _write_planes(self, at: str, step: int, results: list[Pair]) -> None:
        """Write the stores of a butterfly's results to the planes of this pass."""
        for plane in (0, 1):
            base = self._address_of_offset("%work", at, self.target + plane * self.t.plane)
            for k, value in enumerate(results):
                self._store_vector(_value_name_text(value[plane]), self.lanes, base, k * step)

    def _load_neighbours(self, outer: str, offset: int, v: str, mask: str) -> Pair:
        """Load point ``outer + offset`` of neighbouring signals as vectors of real and imaginary parts."""
        return self._deinterleave_complex(
            self._load_vector(2 * self.lanes, self._neighbour_address("%x", outer, offset, v), 0, mask)
        )

    def _store_results(self, at: str, offset: int, value: Pair) -> None:
        """Write the store of neighbouring results of the last pass."""
        if self.t.real:
            for plane in (0, 1):
                base = self._address_of_offset("%work", at, self.target + plane * self.t.plane + offset)
                self._store_vector(_value_name_text(value[plane]), self.lanes, base, 0)
            return
        self._store_complex_results(at, offset, value)

    def _store_complex_results(self, at: str, offset: int, value: Pair) -> None:
        """Write the store of neighbouring results as complex numbers."""
        self._store_vector(
            self._interleave_complex(value),
            2 * self.lanes,
            self._address_of_offset("%out", self._sum_of_terms((at, 2)), 2 * offset),
            0,
        )

    def _neighbour_address(self, array: str, outer: str, offset: int, v: str) -> str:
        """Return the address of point ``outer + offset`` of the signals from ``v`` on."""
        if self.t.stride:
            return self._address_of_offset(
                array, self._sum_of_terms((outer, 2 * self.t.stride), (v, 2)), 2 * self.t.stride * offset
            )
        if 1 not in self.strides:
            self.entry.append("%apart = shl i64 %stride, 1")
        self.strides[1] = "%apart"
        if offset not in self.strides:
            self.strides[offset] = f"%apart{offset}"
            self.entry.append(f"%apart{offset} = mul i64 %apart, {offset}")
        moved = self._append_text_line(f"mul i64 {outer}, %apart")
        return self._address_of_offset(array, self._sum_of_terms((moved, 1), (str(self.strides[offset]), 1), (v, 2)), 0)

    def _load_twiddles(self, stage: FftStage, k: int, t: str, lanes: int) -> Pair:
        """Load the twiddle factors of output ``k`` for ``lanes`` neighbouring ``p`` from ``t`` on."""
        bases = [
            self._address_of_offset("%table", t, stage.table + (k - 1) * stage.m + plane * self.row) for plane in (0, 1)
        ]
        re, im = (Var(self._load_vector(lanes, base, 0), self.t.dtype) for base in bases)
        return re, im

    def _splat_twiddle(self, stage: FftStage, k: int, t: str) -> Pair:
        """Load the twiddle factor of output ``k`` for one ``p`` (``t``), broadcast to all lanes."""
        zeros = ["0"] * self.lanes
        re, im = (
            self._shuffle_vectors(_value_name_text(part), "poison", 1, zeros)
            for part in self._load_twiddles(stage, k, t, 1)
        )
        return Var(re, self.t.dtype), Var(im, self.t.dtype)

    def _signal_lane_mask(self, v: str) -> str:
        """Return the mask of the lanes, of complex numbers from signal ``v`` on, that belong to existing signals."""
        lanes = 2 * self.lanes
        left = self._append_text_line(f"sub i64 {self.width}, {v}")
        twice = self._append_text_line(f"shl i64 {left}, 1")
        one = self._append_text_line(f"insertelement <{lanes} x i64> poison, i64 {twice}, i64 0")
        zeros = ", ".join(["i32 0"] * lanes)
        all_ = self._append_text_line(
            f"shufflevector <{lanes} x i64> {one}, <{lanes} x i64> poison, <{lanes} x i32> <{zeros}>"
        )
        numbers = ", ".join(f"i64 {n}" for n in range(lanes))
        return self._append_text_line(f"icmp slt <{lanes} x i64> <{numbers}>, {all_}")

    # --- values ---

    def _write_vector_operation(self, value: Scalar) -> Scalar:
        """Write an arithmetic operation on vectors; return the scalar variable that stands for its result."""
        assert isinstance(value, Apply)
        operands = ", ".join(self._operand_text(x) for x in value.args)
        return Var(self._append_text_line(f"f{value.fn} contract <{self.lanes} x {self.part}> {operands}"), value.dtype)

    def _operand_text(self, value: Scalar) -> str:
        """Return the LLVM text of an operand: a constant or a register."""
        if isinstance(value, Const):
            assert not isinstance(value.value, complex)
            return f"splat ({self.part} {_float_literal_text(value.value, self.t.dtype)})"
        return _value_name_text(value)

    def _deinterleave_complex(self, both: str) -> Pair:
        """Deinterleave complex numbers into a vector of real parts and a vector of imaginary parts."""
        lanes = 2 * self.lanes
        re, im = (self._shuffle_vectors(both, "poison", lanes, list(map(str, range(n, lanes, 2)))) for n in (0, 1))
        return Var(re, self.t.dtype), Var(im, self.t.dtype)

    def _interleave_complex(self, value: Pair) -> str:
        """Interleave real and imaginary parts into complex numbers, times the scale."""
        if self.t.scale != 1:
            value = self.butterfly.scale(value, self.t.scale)
        order = chain.from_iterable((str(n), str(n + self.lanes)) for n in range(self.lanes))
        return self._shuffle_vectors(_value_name_text(value[0]), _value_name_text(value[1]), self.lanes, list(order))


def _value_name_text(value: Scalar) -> str:
    """Return the register name of a value."""
    assert isinstance(value, Var)
    return value.name


def _float_literal_text(value: float, dtype: str) -> str:
    """Return a number as an LLVM literal: the bits of a double, even for a float."""
    if dtype == "f32":
        (value,) = struct.unpack("<f", struct.pack("<f", value))
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
