"""Emit loops whose iterations a thread interleaves: each statement runs for all iterations before the next statement.

All loads are then issued before all stores and overlap; a GPU compiler may not reorder them itself. Loads and stores of
neighbouring addresses become one access of up to 16 bytes::

    for u in lanes(0, 4):                   v = load <4 x float> of x[4*i]
        y[4*i + u] = exp(x[4*i + u])   ->   w = exp of each
                                            store <4 x float> w to y[4*i]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llvmlite import ir

from aotc.ir.dims.algebra import Dim, Expr, static
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import loads_and_indices, scalars_in, statement_scalars
from aotc.ir.loop.ir import Apply, Buffer, For, Let, Load, Scalar, Stmt, Store, Var
from aotc.kernels.cuda.short_pairs import (
    PAIRED,
    pack_bf16_pair,
    round_to_bf16_pair,
    unpack_bf16_pair,
    values_packed_in_pairs,
)
from aotc.kernels.emit import memory
from aotc.kernels.emit.body import BodyEmitter
from aotc.kernels.emit.index import Frame, flat_index
from aotc.kernels.emit.memory import Annotate
from aotc.kernels.llvm_types import I16, I32, I64, Register, has_bf16, i32, memory_type
from aotc.vmfb.abi import GPU_ALIGNMENT
from aotc.vmfb.dtypes import DTYPES


@dataclass(slots=True)
class LoopLane:
    """An iteration of an interleaved loop: value of the loop variable, and scalars that its statements defined."""

    number: int
    scalars: dict[str, Register] = field(default_factory=dict)
    frame: Frame = field(default_factory=lambda: ({}, {}))


class LanesEmitter(BodyEmitter):
    """Emitter of loops of kind ``lanes``: those with only definitions and stores are interleaved, others unrolled."""

    _scalar_registers: dict[int, Register] = {}  # noqa: RUF012  # registers of scalars, by id(); replaced, never mutated

    def _emit_statement(self, stmt: Stmt) -> None:
        """Emit a statement; loops of kind ``lanes`` that can be interleaved are."""
        match stmt:
            case For(kind="lanes", body=body) if all(isinstance(s, Let | Store) for s in body):
                self._emit_lanes(stmt)
            case _:
                super()._emit_statement(stmt)

    def _registers_of_block(self) -> dict[int, Register]:
        return dict(self._scalar_registers)

    def _emit_lanes(self, loop: For) -> None:
        """Emit an interleaved loop, statement by statement for all lanes."""
        begin, end = (
            static(self._indices.fold_unrolled_variables(loop.begin)),
            static(self._indices.fold_unrolled_variables(loop.end)),
        )
        lanes = [LoopLane(number) for number in range(begin, end, loop.step)]
        varying = {loop.var}
        written = {s.buffer.name for s in loop.body if isinstance(s, Store)}
        self._indices.enter_block()
        self._scalars.append({})
        for stmt in loop.body:
            if isinstance(stmt, Let) and not _varies_between_lanes(stmt.value, varying, written):
                self._emit_statement(stmt)
                continue
            held = self._load_neighbours(stmt, loop.var, lanes, varying)
            self._emit_bf16_pairs(stmt, loop.var, lanes, held)
            if isinstance(stmt, Store) and not stmt.reduce:
                self._store_lanes(stmt, loop.var, lanes, held, varying)
                continue
            if isinstance(stmt, Let):
                varying.add(stmt.var.name)
            for lane, registers in zip(lanes, held, strict=True):
                self._enter_lane(loop.var, lane, registers)
                super()._emit_statement(stmt)
                self._leave_lane(loop.var, lane)
        self._scalars.pop()
        self._indices.leave_block()

    def _enter_lane(self, var: str, lane: LoopLane, held: dict[int, Register]) -> None:
        self._indices.bind_number(var, lane.number)
        self._indices.enter_block(lane.frame)
        self._scalars.append(lane.scalars)
        self._scalar_registers = held

    def _leave_lane(self, var: str, lane: LoopLane) -> None:
        self._scalar_registers = {}
        self._scalars.pop()
        self._indices.leave_block()
        self._indices.unbind_number(var)

    def _store_lanes(
        self, stmt: Store, var: str, lanes: Sequence[LoopLane], held: Sequence[dict[int, Register]], varying: set[str]
    ) -> None:
        """Emit the stores of all lanes, after the values of all of them are computed."""
        values: list[Register] = []
        for lane, registers in zip(lanes, held, strict=True):
            self._enter_lane(var, lane, registers)
            values.append(self.scalar(stmt.value))
            self._leave_lane(var, lane)
        buffer = stmt.buffer
        annotate = self._metadata.access_annotation(buffer)
        flats = self._flat_indices_of_lanes(buffer, stmt.index, var, lanes, varying - {var})
        width = _lanes_per_vector_access(buffer, flats)
        if not width:
            for lane, value in zip(lanes, values, strict=True):
                self._enter_lane(var, lane, {})
                memory.store_element(
                    self.builder, value, self._element_address(buffer, stmt.index), buffer.dtype, annotate
                )
                self._leave_lane(var, lane)
            return
        for first in range(0, len(lanes), width):
            group = values[first : first + width]
            parts = [x for value in group for x in self._encode_lane_value(value, buffer.dtype)]
            emit_vector_store(self.builder, parts, self.address(buffer, flats[first]), annotate)

    def _encode_lane_value(self, value: Register, dtype: str) -> Sequence[ir.Value]:
        return value if isinstance(value, tuple) else (memory.encode_element(self.builder, value, dtype),)

    def _emit_bf16_pairs(
        self, stmt: Stmt, var: str, lanes: Sequence[LoopLane], held: list[dict[int, Register]]
    ) -> None:
        """Emit bf16 arithmetic on packed pairs of two lanes, and record the register of each lane."""
        if len(lanes) % 2 or not has_bf16(self.builder):
            return
        stored = isinstance(stmt, Store) and stmt.buffer.dtype == "bf16" and not stmt.reduce
        pairs = values_packed_in_pairs(statement_scalars(stmt), stored)
        for first in range(0, len(lanes), 2):
            words: dict[int, ir.Value] = {}
            both = list(zip(lanes, held))[first : first + 2]
            for node in pairs:
                word = words[id(node)] = self._emit_packed_pair(node, var, both, words)
                for (_, registers), register in zip(both, unpack_bf16_pair(self.builder, word)):
                    registers[id(node)] = register

    def _emit_packed_pair(
        self, node: Apply, var: str, both: Sequence[tuple[LoopLane, dict[int, Register]]], words: dict[int, ir.Value]
    ) -> ir.Value:
        """Emit the bf16 value of ``node`` for two lanes as one packed register."""

        def of_both(value: Scalar) -> list[Any]:
            found = []
            for lane, registers in both:
                self._enter_lane(var, lane, registers)
                found.append(self.scalar(value))
                self._leave_lane(var, lane)
            return found

        if node.fn == "convert":
            return round_to_bf16_pair(self.builder, *of_both(node.args[0]))
        given = (words[id(a)] if id(a) in words else pack_bf16_pair(self.builder, *of_both(a)) for a in node.args)
        return PAIRED[node.fn](self.builder, *given)

    def _load_neighbours(
        self, stmt: Stmt, var: str, lanes: Sequence[LoopLane], varying: set[str]
    ) -> list[dict[int, Register]]:
        """Emit vector loads of elements that are contiguous across lanes; return the register of each load, by lane."""
        held: list[dict[int, Register]] = [{} for _ in lanes]
        for load in loads_and_indices(statement_scalars(stmt)):
            if not isinstance(load, Load) or id(load) in held[0]:
                continue
            flats = self._flat_indices_of_lanes(load.buffer, load.index, var, lanes, varying - {var})
            distinct = list(dict.fromkeys(flats))
            distinct = distinct if 1 < len(distinct) < len(flats) else flats  # lanes that share an element read it once
            width = _lanes_per_vector_access(load.buffer, distinct)
            found: list[Register] = []
            for first in range(0, len(distinct) if width else 0, width or 1):
                found += self._load_lane_vector(load.buffer, self.address(load.buffer, distinct[first]), width)
            for n, (registers, flat) in enumerate(zip(held, flats)):
                if found:
                    registers[id(load)] = found[n if distinct is flats else distinct.index(flat)]
        return held

    def _load_lane_vector(self, buffer: Buffer, address: ir.Value, width: int) -> list[Register]:
        parts = _registers_per_element(buffer)
        annotate = self._metadata.access_annotation(buffer)
        raw = emit_vector_load(self.builder, address, memory_type(buffer.dtype), width * parts, annotate)
        if parts == 2:
            return [(raw[n], raw[n + 1]) for n in range(0, len(raw), 2)]
        return [memory.decode_element(self.builder, x, buffer.dtype) for x in raw]

    def _flat_indices_of_lanes(
        self, buffer: Buffer, index: tuple[Dim, ...], var: str, lanes: Sequence[LoopLane], unknown: set[str]
    ) -> list[Dim]:
        """Return the flat index that each lane accesses; empty if the index depends on values computed per lane."""
        flat = flat_index(buffer, index)
        if buffer.space not in ("global", "shared") or not unknown.isdisjoint(s.name for s in symbols(flat)):
            return []
        found: list[Dim] = []
        for lane in lanes:
            self._indices.bind_number(var, lane.number)
            found.append(self._indices.fold_unrolled_variables(flat))
            self._indices.unbind_number(var)
        return found


def _varies_between_lanes(value: Scalar, varying: set[str], written: set[str]) -> bool:
    """Return True if ``value`` may differ between lanes, or from its value before the loop."""
    for part in scalars_in([value]):
        match part:
            case Var(name=name) if name in varying:
                return True
            case Load(buffer=buffer) if buffer.name in written:
                return True
    dims = [e for leaf in loads_and_indices([value]) for e in (leaf.index if isinstance(leaf, Load) else (leaf.expr,))]
    return any(s.name in varying for e in dims for s in symbols(e))


def _registers_per_element(buffer: Buffer) -> int:
    return 2 if DTYPES[buffer.dtype].kind == "c" else 1


def _lanes_per_vector_access(buffer: Buffer, flats: Sequence[Dim]) -> int:
    """Return the number of lanes of one vector access; 0 if their elements are not contiguous or not aligned."""
    kind, parts = memory_type(buffer.dtype), _registers_per_element(buffer)
    width = 1
    while len(flats) % (2 * width) == 0 and flats and fits_vector_access(kind, 2 * width * parts, GPU_ALIGNMENT):
        width *= 2
    while width * parts > 1 and not _are_contiguous(flats, width):
        width //= 2
    return width if fits_vector_access(kind, width * parts, GPU_ALIGNMENT) and flats else 0


def _are_contiguous(flats: Sequence[Dim], width: int) -> bool:
    return all(
        _is_multiple_of_width(flats[first], width)
        and all(flats[first + k] - flats[first] == k for k in range(1, width))
        for first in range(0, len(flats), width)
    )


def _is_multiple_of_width(flat: Dim, width: int) -> bool:
    """Return True if the flat index is provably a multiple of ``width``; all buffers are aligned."""
    if isinstance(flat, Expr):
        return flat.const % width == 0 and all(c % width == 0 for _, c in flat.terms)
    return flat % width == 0


def _bits_of_type(kind: ir.Type) -> int:
    return 64 if kind == ir.DoubleType() else 32 if kind == ir.FloatType() else kind.width


def _vector_access_pieces(kind: ir.Type, count: int) -> tuple[ir.Type, int, int]:
    """Return the type of each piece of a vector access, the number of pieces, and the number of elements per piece."""
    bits = _bits_of_type(kind)
    if bits >= 32:
        return kind, count, 1
    piece = I32 if bits * count >= 32 else I16
    return piece, bits * count // piece.width, piece.width // bits


def emit_vector_load(
    builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, count: int, annotate: Annotate
) -> list[ir.Value]:
    """Emit the load of ``count`` elements, a power of two, by vector loads; return them in memory form."""
    piece, pieces, each = _vector_access_pieces(kind, count)
    raw = builder.load(address, typ=piece if pieces == 1 else ir.VectorType(piece, pieces))
    raw.align = _bits_of_type(kind) * count // 8
    annotate(raw)
    parts = [raw] if pieces == 1 else [builder.extract_element(raw, i32(n)) for n in range(pieces)]
    return parts if each == 1 else [x for part in parts for x in _split_vector(builder, part, kind, each)]


def _split_vector(builder: ir.IRBuilder, part: ir.Value, kind: ir.Type, each: int) -> list[ir.Value]:
    width = _bits_of_type(kind)
    shifted = [part if n == 0 else builder.lshr(part, ir.Constant(part.type, n * width)) for n in range(each)]
    return [builder.trunc(x, kind) for x in shifted]


def emit_vector_store(builder: ir.IRBuilder, values: list[ir.Value], address: ir.Value, annotate: Annotate) -> None:
    """Emit the store of elements in memory form, a power of two of them, by vector stores."""
    kind = values[0].type
    piece, pieces, each = _vector_access_pieces(kind, len(values))
    parts = (
        values
        if each == 1
        else [_join_vector(builder, values[n : n + each], piece) for n in range(0, len(values), each)]
    )
    whole = parts[0]
    if pieces > 1:
        whole = ir.Constant(ir.VectorType(piece, pieces), ir.Undefined)
        for n, part in enumerate(parts):
            whole = builder.insert_element(whole, part, i32(n))
    stored = builder.store(whole, address)
    stored.align = _bits_of_type(kind) * len(values) // 8
    annotate(stored)


def _join_vector(builder: ir.IRBuilder, values: list[ir.Value], piece: ir.IntType) -> ir.Value:
    width = _bits_of_type(values[0].type)
    whole = builder.zext(values[0], piece)
    for n, value in enumerate(values[1:], 1):
        whole = builder.or_(whole, builder.shl(builder.zext(value, piece), ir.Constant(piece, n * width)))
    return whole


def fits_vector_access(kind: ir.Type, count: int, vector: int) -> bool:
    """Return True if ``count`` elements can be one vector access of at most ``vector`` bytes."""
    return (
        count > 1
        and _bits_of_type(kind) * count <= 8 * vector
        and _bits_of_type(kind) <= I64.width
        and _bits_of_type(kind) * count >= 16
    )
