"""Workaround for LLVM 22 on x86: a masked store of one 8- or 16-bit lane may overwrite its neighbour.

LLVM writes the lane as 32 bits. A vectorized loop with a masked last vector has such a store, with a constant mask, if
one iteration is left. LLVM turns it into a scalar store of the lane (``reduceMaskedStoreToScalarStore``). If it merged
the store with a truncation before, the scalar store has the width before the truncation. This module extracts the lane
before LLVM does::

    call void @llvm.masked.store.v16i16.p0(<16 x i16> %x, ptr align 2 %p, <16 x i1> <i1 true, i1 false, ...>)
    ->
    %lane.1 = extractelement <16 x i16> %x, i64 0
    %place.1 = getelementptr i16, ptr %p, i64 0
    store i16 %lane.1, ptr %place.1, align 2
"""

from __future__ import annotations

import re

from aotc.kernels.back_end import Library

_STORED = re.compile(r"^llvm\.masked\.store\.v\d+i(8|16)\.")
_CALL = re.compile(
    r"^ *(?:tail )?call void @llvm\.masked\.store\.v\d+i(?:8|16)\.p0"
    r"\((?P<vector><\d+ x (?P<type>i8|i16)>) (?P<value>[^,]+), ptr (?P<align>align \d+) (?P<place>[^,]+), "
    r"<\d+ x i1> <(?P<mask>i1 (?:true|false)(?:, i1 (?:true|false))*)>\)(?P<metadata>.*)$",
    re.MULTILINE,
)


_NARROW = re.compile(r"\bstore (?:<\d+ x )?i(?:8|16)\b|\.masked\.store\.")


def stores_narrow(text: str) -> bool:
    """Return True if a kernel's assembly has stores from which LLVM could create one: stores of 8 or 16 bits."""
    return _NARROW.search(text) is not None


def remove_one_lane_stores(library: Library) -> None:
    """Replace the module of ``library`` by an equivalent module without such stores, if it has any."""
    if not any(_STORED.match(function.name) for function in library.module.functions):
        return
    text, before = "", str(library.module)
    ends = 0
    for number, found in enumerate(_CALL.finditer(before)):
        lanes = found["mask"].split(", ")
        if lanes.count("i1 true") == 1:
            text += before[ends : found.start()] + _plain(found, lanes.index("i1 true"), number)
            ends = found.end()
    if ends:
        library.replace(text + before[ends:])


def _plain(found: re.Match[str], lane: int, number: int) -> str:
    return (
        f"  %lane.{number} = extractelement {found['vector']} {found['value']}, i64 {lane}\n"
        f"  %place.{number} = getelementptr {found['type']}, ptr {found['place']}, i64 {lane}\n"
        f"  store {found['type']} %lane.{number}, ptr %place.{number}, {found['align']}{found['metadata']}"
    )
