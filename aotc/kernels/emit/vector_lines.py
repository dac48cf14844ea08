"""Functions of explicit vector code, written line by line as the text that LLVM reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.vmfb.dtypes import size_of

_LLVM = {"f32": "float", "f64": "double", "i8": "i8", "i16": "i16"}


class VectorLines:
    """Writes the lines of a function of one type of numbers.

    Values are names of registers or literals; an offset into memory is in elements.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype, self.part, self.size = dtype, _LLVM[dtype], size_of(dtype)
        self.entry: list[str] = []
        self.lines: list[str] = []
        self.declared: set[str] = set()
        self.count, self.loops, self.block = 0, 0, "entry"

    def _line(self, what: str) -> str:
        self.count += 1
        self.lines.append(f"%v{self.count} = {what}")
        return f"%v{self.count}"

    def _sum(self, *terms: tuple[str, int]) -> str:
        """Return the sum of values times numbers."""
        total = ""
        for value, factor in terms:
            if value == "0":
                continue
            product = value if factor == 1 else self._line(f"mul i64 {value}, {factor}")
            total = self._line(f"add i64 {total}, {product}") if total else product
        return total or "0"

    def _address(self, array: str, at: str, offset: int) -> str:
        base = array if at == "0" else self._line(f"getelementptr {self.part}, ptr {array}, i64 {at}")
        return self._line(f"getelementptr {self.part}, ptr {base}, i64 {offset}") if offset else base

    def _load(self, lanes: int, base: str, offset: int, mask: str = "") -> str:
        place, kind = self._address(base, "0", offset), f"<{lanes} x {self.part}>"
        if not mask:
            return self._line(f"load {kind}, ptr {place}, align {self.size}")
        name = f"@llvm.masked.load.v{lanes}{self.dtype}.p0"
        self.declared.add(f"declare {kind} {name}(ptr, i32, <{lanes} x i1>, {kind})")
        return self._line(
            f"call {kind} {name}(ptr {place}, i32 {self.size}, <{lanes} x i1> {mask}, {kind} zeroinitializer)"
        )

    def _store(self, value: str, lanes: int, base: str, offset: int, mask: str = "") -> None:
        place, kind = self._address(base, "0", offset), f"<{lanes} x {self.part}>"
        if not mask:
            self.lines.append(f"store {kind} {value}, ptr {place}, align {self.size}")
            return
        name = f"@llvm.masked.store.v{lanes}{self.dtype}.p0"
        self.declared.add(f"declare void {name}({kind}, ptr, i32, <{lanes} x i1>)")
        self.lines.append(f"call void {name}({kind} {value}, ptr {place}, i32 {self.size}, <{lanes} x i1> {mask})")

    def _shuffle(self, a: str, b: str, lanes: int, mask: Sequence[str]) -> str:
        kind, picked = f"<{lanes} x {self.part}>", ", ".join(f"i32 {n}" for n in mask)
        return self._line(f"shufflevector {kind} {a}, {kind} {b}, <{len(mask)} x i32> <{picked}>")

    def _loop(self, end: int, step: int, body: Callable[[str], None]) -> None:
        """Write a loop over ``0, step, ...`` whose last turn ends at ``end``; a step beyond it is one turn."""
        turns = -(-end // step)
        if turns <= 1:
            body("0")
            return
        self.loops += 1
        name, before = f"l{self.loops}", self.block
        self._begin(name)
        self.lines.append(f"%{name}_at = phi i64 [ 0, %{before} ], [ %{name}_next, %{name}_end ]")
        at = f"%{name}_at" if step == 1 else self._line(f"mul i64 %{name}_at, {step}")
        if end % step:
            self.declared.add("declare i64 @llvm.umin.i64(i64, i64)")
            at = self._line(f"call i64 @llvm.umin.i64(i64 {at}, i64 {end - step})")
        body(at)
        self._begin(f"{name}_end")
        self.lines.append(f"%{name}_next = add i64 %{name}_at, 1")
        more = self._line(f"icmp ult i64 %{name}_next, {turns}")
        self.block = f"{name}_after"
        self.lines += [f"br i1 {more}, label %{name}, label %{self.block}", f"{self.block}:"]

    def _begin(self, name: str) -> None:
        self.lines += [f"br label %{name}", f"{name}:"]
        self.block = name
