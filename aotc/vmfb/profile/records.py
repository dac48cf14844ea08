"""Data classes of recorded dispatches: kernel, time, threads and rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aotc.vmfb.profile.touched_bytes import touched_bytes
from aotc.vmfb.profile.trace import declared_flops, read_kernel_header


class Part(NamedTuple):
    """A claim in a recording: the items ``[first, last)`` of a dispatch that one thread ran together; start and end."""

    first: int
    last: int
    began: int
    ended: int
    thread: int


class Dispatch(NamedTuple):
    """One execution of a kernel in a recording.

    Attributes
    ----------
    kernel, loc : str
        The kernel's name, and its line of the model.
    sizes : dict of str to int
        Sizes of its dims.
    start, ns : int
        Start in nanoseconds since the recording started, and duration from the first claim's start to the last one's
        end.
    busy : int
        Nanoseconds of all threads in the kernel.
    items, claims : int
        Number of grid items, and of the claims that they were divided into.
    threads : list of int
        Threads that took part; 0 is the thread that made the recording.
    bytes, flops : int
        Distinct bytes of its arrays that it accesses; scalar operations, 0 if unknown.
    gflops, gbs : float
        Operations and bytes per nanosecond of ``ns``.
    roofline : float
        Fraction of ``busy`` that a core of this machine needs for this many operations, or bytes if that is longer
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
    """A named span of the thread that made the recording."""

    name: str
    start: int
    ns: int


class KernelFacts(NamedTuple):
    """Sizes of a kernel's dims, and the operations and bytes of one run with these sizes."""

    sizes: dict[str, int]
    bytes: int
    flops: int


def kernel_work_facts(text: str, sizes: Sequence[int]) -> KernelFacts:
    """Return a kernel's operations and bytes for these sizes, from its text; 0 if a dim is unknown."""
    header = read_kernel_header(text)
    known = dict(zip(header.dims, sizes))
    try:
        return KernelFacts(known, sum(touched_bytes(text, tuple(sizes))), declared_flops(text, known))
    except KeyError:  # a dim that did not fit in a row
        return KernelFacts(known, 0, 0)
