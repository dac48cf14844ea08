"""The compiler's options: one frozen record; every CLI flag is a field of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Options:
    """How to compile.

    Attributes
    ----------
    target : str
        ``cpu`` (this machine), ``cpu:x86-64-v3``, ``cpu:x86-64-v4``, ``cuda:sm_90``;
        several, separated by commas, make one bundle for all of them.
    opt_level : int
        0 one op per region, 1 elementwise fusion, 2 the default, 3 aggressive.
    weights : str
        ``inline``, or the path of a safetensors file that holds the constants.
    specialize : mapping of str to sequence of int
        Sizes of symbolic dims for which functions are compiled once more: ``{"b": (1, 8)}``.
    debug_info : bool
        Keep source locations and kernel text in the bundle.
    cache : bool
        Reuse compiled kernels, and whole bundles that took long, from the cache directory.
    jobs : int
        Compiler processes; 0 means one per core.
    verify_each : bool
        Verify the IR after every pass, each kernel, and each stage from there to the host program.
    dump_ir : str
        Folder for the IR after every pass, and for kernels and steps, or empty.
    print_after : str
        Name of the pass after which to print the IR, or empty.
    stop_after : str
        Name of the pass after which to stop, or empty.
    bisect : int
        Leave out the optional passes after this number; -1 means none.
    timings : bool
        Print the time of every pass.
    progress : callable or None
        ``progress(done, total, what)`` is called as compilation advances.
    """

    target: str = "cpu"
    opt_level: int = 2
    weights: str = "inline"
    specialize: Mapping[str, Sequence[int]] = field(default_factory=dict)
    debug_info: bool = True
    cache: bool = True
    jobs: int = 0
    verify_each: bool = False
    dump_ir: str = ""
    print_after: str = ""
    stop_after: str = ""
    bisect: int = -1
    timings: bool = False
    progress: Callable[[int, int, str], None] | None = None
