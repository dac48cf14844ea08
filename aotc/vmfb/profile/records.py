"""What is told of a dispatch: facts of its kernel, when it ran, how fast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aotc.vmfb.profile.touched_bytes import touched_bytes
from aotc.vmfb.profile.trace import flops_of, read_header


class Part(NamedTuple):
    """Items ``[first, last)`` of a dispatch, run at once: nanoseconds since the recording began, and the thread."""

    first: int
    last: int
    began: int
    ended: int
    thread: int


class Dispatch(NamedTuple):
    """A run of a kernel.

    Attributes
    ----------
    kernel, loc : str
        Its name, and the line of the model that it is from.
    sizes : dict of str to int
        Of its dims.
    start, ns : int
        Nanoseconds since the recording began, and from its first claim's beginning to its last one's end.
    busy : int
        Nanoseconds that threads spent in it together.
    items, claims : int
        Of its grid, and in how many parts they were taken.
    threads : list of int
        That took part: 0 is the one that made the recording.
    bytes, flops : int
        Of its arrays that it touches, each byte once; operations on scalars, 0 where nobody knows.
    gflops, gbs : float
        Operations and bytes in a nanosecond of ``ns``.
    roofline : float
        The part of ``busy`` that a core of this machine takes for as many operations, or bytes if that is longer
        (:mod:`aotc.vmfb.profile.roofline`).
    parts : list of Part
    """

    kernel: str
    loc: str
    sizes: dict[str, int]
    start: int
    ns: int
    busy: int
    items: int
    claims: int
    threads: list[int]
    bytes: int
    flops: int
    gflops: float
    gbs: float
    roofline: float
    parts: list[Part]


class Span(NamedTuple):
    """What the thread that made the recording did, by the name that it was given."""

    name: str
    start: int
    ns: int


class KernelFacts(NamedTuple):
    """What a kernel does for some sizes."""

    sizes: dict[str, int]
    bytes: int
    flops: int


def work_of(text: str, sizes: Sequence[int]) -> KernelFacts:
    """Return what a kernel does, by the header of its text; of dims that are not known nothing is counted."""
    header = read_header(text)
    known = dict(zip(header.dims, sizes))
    try:
        return KernelFacts(known, sum(touched_bytes(text, tuple(sizes))), flops_of(text, known))
    except KeyError:  # of a dim that had no room in a row
        return KernelFacts(known, 0, 0)
