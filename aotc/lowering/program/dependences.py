"""Track, for each byte, its last writer and the readers since: the dependences between commands.

Static storages of the arena may overlap in any way; this part of the arena is a list of disjoint spans, split where
storages begin or end. Any other storage overlaps only storages at the same offset (``plan_memory``).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import static
from aotc.ir.program.ir import Storage


@dataclass(slots=True)
class _Span:
    """Range of bytes with equal accesses so far; ``end`` is used only in the static part of the arena."""

    end: int = 0
    writer: int = -1
    readers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class MemoryAccesses:
    """Record of the accesses of the commands so far."""

    begins: list[int] = field(default_factory=list)
    spans: list[_Span] = field(default_factory=list)
    others: dict[tuple, _Span] = field(default_factory=dict)

    def read(self, s: Storage, command: int) -> Iterator[int]:
        """Record that ``command`` reads ``s``; yield the commands that it must wait for."""
        if s.kind == "constant":
            return
        for span in self._spans_of_storage(s):
            if not span.readers or span.readers[-1] != command:
                span.readers.append(command)
            if span.writer >= 0:
                yield span.writer

    def write(self, s: Storage, command: int) -> Iterator[int]:
        """Record that ``command`` writes ``s``; yield the commands that it must wait for."""
        spans = self._spans_of_storage(s)
        for span in spans:
            yield from span.readers
            if span.writer >= 0:
                yield span.writer
            span.writer, span.readers = command, []
        if len(spans) > 1:  # they have one history now
            first = bisect_left(self.begins, static(s.offset))
            spans[0].end = spans[-1].end
            del self.begins[first + 1 : first + len(spans)], self.spans[first + 1 : first + len(spans)]

    def _spans_of_storage(self, s: Storage) -> list[_Span]:
        """Return the spans of a storage's bytes."""
        if s.kind != "arena" or not isinstance(s.size, int):
            place = (s.kind, s.offset if s.kind == "arena" else s.number)
            return [self.others.setdefault(place, _Span())]
        return self._split_spans_at(static(s.offset), static(s.offset) + s.size) if s.size else []

    def _split_spans_at(self, begin: int, end: int) -> list[_Span]:
        """Split the recorded spans so that some of them cover exactly the bytes from ``begin`` to ``end``."""
        self._split_span_at(begin)
        self._split_span_at(end)
        at = bisect_left(self.begins, begin)
        spans = []
        while begin < end:
            if at == len(self.begins) or self.begins[at] > begin:  # bytes that no command has touched yet
                stop = min(end, self.begins[at]) if at < len(self.begins) else end
                self.begins.insert(at, begin)
                self.spans.insert(at, _Span(stop))
            spans.append(self.spans[at])
            begin = self.spans[at].end
            at += 1
        return spans

    def _split_span_at(self, place: int) -> None:
        """Split the span that contains the offset ``place``, if there is one."""
        at = bisect_right(self.begins, place) - 1
        if at >= 0 and self.begins[at] < place < self.spans[at].end:
            self.begins.insert(at + 1, place)
            cut = self.spans[at]
            self.spans.insert(at + 1, _Span(cut.end, cut.writer, list(cut.readers)))
            cut.end = place
