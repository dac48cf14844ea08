"""The compiler's options: one frozen record; every CLI flag is a field of it; and what they may be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any

from aotc.diagnostics import UNKNOWN, AotcWarning, CallbackFailed, CompileError
from aotc.vmfb.api.result_names import pairs_of
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.byte_sizes import EXAMPLES, as_bytes

SAID, AUTO = "said", "auto"  # what places ops on devices
REFUSE, DROP = "refuse", "drop"  # what becomes of calls back into Python
PRECISIONS = ("model", "bf16", "bf16x3", "highest")  # of matmuls and convolutions of f32
UNPACKED = "unpacked"  # weights in the bundle, addressed by the paths of their arguments
QUANTIZED = {"int8": 8, "int4": 4}  # bits of a weight, by option value
HOST, DEVICE = "host", "device"  # the devices that stand for JAX's kinds of memory, if options name both


def _is_guarded() -> bool:
    return os.environ.get("AOTC_GUARD", "") not in ("", "0")


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
    matmul_precision : str
        Of products and convolutions of f32 for which the model asks none: ``model``, f32 on CPUs and TF32 on GPUs;
        ``bf16``, operands rounded to 8 bits; ``bf16x3``, to 16 by three products; ``highest``, f32 on GPUs too.
        Attention that is one op keeps what the model says.
    quantize_weights : str
        ``int8`` or ``int4``: large constants that are multiplied as matrices are kept as integers of so many bits, with
        a scale for each column of the result; after a colon, a scale for so many terms of its sums (``int4:64``).
    weights : str
        ``inline``, or the path of a safetensors file that holds the constants. With ``bind``, where the examples of
        these arguments go, by their paths: that file, or the bundle itself (``unpacked``); its functions take the rest.
    specialize : mapping of str to sequence of int
        Sizes of symbolic dims for which functions are compiled once more: ``{"b": (1, 8)}``.
    bind : sequence of str or int
        Arguments that ``LoadedModule.bind`` will be given once, by name, tree (``args[0]`` for ``args[0]['w']``...) or
        number: what depends on them alone, as the packing of weights, is computed there, not in each call.
    state : sequence of str, or mapping of str to str
        Results that are arguments of the next call: ``("cache",)`` where both are called so, else
        ``{"result[0]": "cache"}``.
        Their memory may be the arguments' (as if these were donated), and ``LoadedModule.state`` knows of them.
    debug_info : bool
        Keep source locations and kernel text in the bundle.
    source : bool
        Keep the model itself in the bundle, which ``aotc upgrade`` compiles again.
    cache : bool
        Reuse compiled kernels, and whole bundles that took long, from the cache directory.
    jobs : int
        Kernels compiled at the same time, by threads or processes; 0 means one per core.
    verify_each : bool
        Verify the IR after every pass, what the passes so far establish, each kernel, and each stage from there to the
        host program.
    dump_ir : str
        Folder for the IR after every pass, and for kernels and steps, or empty.
    print_after : str
        Name of the pass after which to print the IR, or empty.
    stop_after : str
        Name of the pass after which to stop, or empty.
    reproducer : str
        File for all that repeats the compilation, written when the model has been read, or empty: then it is written
        only where the compiler itself is at fault.
    bisect : int
        Leave out the optional passes after this number; -1 means none.
    timings : bool
        Print the time of every pass.
    devices : mapping of str to str
        The devices that the model names, with a target for each: ``{"d0": "cpu:x86-64-v3"}``; others take ``target``.
    default_device : str
        Where ops and arguments go that nothing places; empty refuses them where there are several devices.
    costs : mapping
        What kernels took when they were measured (``LoadedModule.profile``), in place of what the cost model predicts.
    place : str
        ``said``: by affinities alone; ``auto``: the cost model places large ops on the devices that the model or
        ``devices`` name.
    max_transfers : int
        Refuse the model if it takes more transfers between devices; -1 means any number.
    host_fallback : bool
        For a GPU alone: run on the host what has no form there (LAPACK, custom calls) and move values; or refuse it.
    host_target : str
        The CPU target of what then runs on the host; empty means one that ``target`` names beside the GPU, the one
        that needs least of the machine, else ``cpu:x86-64-v3`` or ``cpu:aarch64``, as this machine is.
    memory_limit : int
        Bytes that a call may take besides arguments, results and weights, with one thread at least; 0 means any number.
        What would take more is computed a part after the other, or twice, or moved from a GPU to the host, or else
        refused. Of a program for the CPU and GPUs each memory has the limit. Limits may also be text: ``"64MB"``.
    stack_limit, shared_memory_limit : int
        Bytes of a thread's stack, and of the shared memory of a GPU's block, that a kernel's arrays may take, if less
        than the target's; 0 means the target's.
    callbacks : str
        ``refuse`` calls back into Python that nothing is registered for, or ``drop`` those whose results nobody reads.
    guard : bool
        Leave pages between all blocks of memory, which ``AOTC_GUARD=1`` makes untouchable when the bundle runs; also
        what that says when compiling.
    progress : callable or None
        ``progress(done, total, what)`` is called as compilation advances.
    """

    target: str = "cpu"
    opt_level: int = 2
    matmul_precision: str = PRECISIONS[0]
    quantize_weights: str = "none"
    weights: str = "inline"
    specialize: Mapping[str, Sequence[int]] = field(default_factory=dict)
    bind: Sequence[str | int] = ()
    state: Sequence[str] | Mapping[str, str] = ()
    debug_info: bool = True
    source: bool = True
    cache: bool = True
    jobs: int = 0
    verify_each: bool = False
    dump_ir: str = ""
    print_after: str = ""
    stop_after: str = ""
    reproducer: str = ""
    bisect: int = -1
    timings: bool = False
    devices: Mapping[str, str] = field(default_factory=dict)
    default_device: str = ""
    costs: Mapping[str, Any] = field(default_factory=dict)
    place: str = SAID
    max_transfers: int = -1
    host_fallback: bool = True
    host_target: str = ""
    memory_limit: int = 0
    stack_limit: int = 0
    shared_memory_limit: int = 0
    callbacks: str = REFUSE
    guard: bool = field(default_factory=_is_guarded)
    progress: Callable[[int, int, str], None] | None = None

    def advance(self, done: int, total: int, what: str) -> None:
        """Tell ``progress`` how far compilation is.

        Raises
        ------
        CallbackFailed
            If it raises anything; :func:`aotc.guard.callers_errors` lets that out as it is.
        """
        if self.progress is not None:
            try:
                self.progress(done, total, what)
            except BaseException as error:
                raise CallbackFailed(error) from error


WATCHED = frozenset({"dump_ir", "print_after", "stop_after", "timings", "verify_each"})
"""Options by which somebody watches a compilation."""
OF_THE_RUN = frozenset({"progress", "jobs", "cache", "reproducer"}) | WATCHED
"""Options that change no byte of a bundle; a new one is thought to change some."""

_KINDS = {bool: (bool,), int: (Integral,), str: (str,)}
"""What an option may be, by the type of its default."""
_PATHS = ("weights", "dump_ir", "reproducer")
"""Options of text that may also be paths."""
_BYTES = ("memory_limit", "stack_limit", "shared_memory_limit")
"""Options that are numbers of bytes, and may also be text."""


def with_bytes(options: Options) -> Options:
    """Return the options with numbers in place of texts such as ``64MB``.

    Raises
    ------
    CompileError
        If one is no size.
    """
    found = {name: getattr(options, name) for name in _BYTES}
    for name, value in found.items():
        try:
            found[name] = as_bytes(value)
        except ValueError:
            raise _wrong(f"{name} is {value!r}"[:80], EXAMPLES) from None
    return replace(options, **found)


RENAMED = MappingProxyType({
    "locate-extremes": "vectorize-argmax",
    "share-rows": "softmax-by-reciprocal",
    "spread-work": "parallelize-gpu",
})  # fmt: skip
"""Names of passes in earlier versions, and their names now."""


def with_current_passes(options: Options) -> Options:
    """Return ``options`` with the present names of the passes that ``stop_after`` and ``print_after`` name."""
    current: dict[str, Any] = {}
    for name in ("stop_after", "print_after"):
        value = getattr(options, name)
        if isinstance(value, str) and value in RENAMED:
            current[name] = RENAMED[value]
            warnings.warn(AotcWarning(f"{name}: the pass {value} is called {RENAMED[value]} now"), stacklevel=2)
    return replace(options, **current)


# Maximum number of compiler processes or threads. A process takes 200 MB; a mistyped ten thousand would exhaust memory.
MOST_PROCESSES = 256
# Maximum of a byte limit: bundles and kernels store sizes in signed 64-bit integers.
MOST_BYTES = (1 << 63) - 1


def check_options(options: Options, passes: Sequence[str]) -> None:
    """Refuse options that name nothing; ``passes`` are the names that ``stop_after`` and ``print_after`` may have.

    Raises
    ------
    CompileError
        If an option is of another type, ``stop_after`` or ``print_after`` is no pass, ``weights`` no safetensors file,
        ``dump_ir`` no folder, ``opt_level`` no level, ``matmul_precision`` or ``quantize_weights`` nothing known,
        ``jobs`` negative, ``specialize`` no sizes by name.
    """
    for f in fields(options):
        value = getattr(options, f.name)
        path = f.name in _PATHS and isinstance(value, os.PathLike)
        kind = type(f.default)
        if not path and (not isinstance(value, _KINDS.get(kind, object)) or (kind is int and isinstance(value, bool))):
            raise _wrong(f"{f.name} is {value!r}", f"a value of type {kind.__name__}")
    if not 0 <= options.jobs <= MOST_PROCESSES:
        raise _wrong(f"jobs is {options.jobs}", f"a number of processes, at most {MOST_PROCESSES}; 0 is one per core")
    if options.opt_level not in range(4):
        raise _wrong(f"opt_level is {options.opt_level!r}", "0, 1, 2 or 3")
    if options.matmul_precision not in PRECISIONS:
        raise _wrong(f"matmul_precision is {options.matmul_precision!r}", f"one of {', '.join(PRECISIONS)}")
    quantization(options)
    names = list(dict.fromkeys(passes))
    for name in filter(None, (options.stop_after, options.print_after)):
        if name not in names:
            raise _wrong(f"no pass {name!r}", f"one of {', '.join(names)}")
    if options.callbacks not in (REFUSE, DROP):
        raise _wrong(f"callbacks is {options.callbacks!r}", f"{REFUSE} or {DROP}")
    if options.weights not in ("inline", UNPACKED) and not os.fspath(options.weights).endswith(".safetensors"):
        raise _wrong(f"weights is {options.weights!r}", f"inline, {UNPACKED}, or a path.safetensors")
    for name in _PATHS:
        if "\0" in os.fsdecode(getattr(options, name)):
            raise _wrong(f"{name} is {getattr(options, name)!r}", "a path, which has no null characters")
    folder = Path(options.dump_ir)
    if options.dump_ir and any(p.exists() and not p.is_dir() for p in (folder, *folder.parents)):
        raise _wrong(f"dump_ir is {options.dump_ir!r}, which is no folder", "a new folder")
    if not _are_sizes(options.specialize):
        raise _wrong(f"specialize is {options.specialize!r}", "sizes by the names of dims: {'b': (1, 8)}")
    if not _are_arguments(options.bind):
        raise _wrong(f"bind is {options.bind!r}", "names or numbers of arguments: ('w', 'args[1]', 2)")
    try:
        pairs_of(options.state)
    except VmError as error:
        raise CompileError.at(UNKNOWN, str(error)) from None
    if not _are_names(options.devices):
        raise _wrong(f"devices is {options.devices!r}", "targets by the names of devices: {'d0': 'cpu'}")
    if options.place not in (SAID, AUTO):
        raise _wrong(f"place is {options.place!r}", f"{SAID} or {AUTO}")
    if options.max_transfers < -1:
        raise _wrong(f"max_transfers is {options.max_transfers}", "a number, or -1 for any")
    for name in _BYTES:
        if not 0 <= getattr(options, name) <= MOST_BYTES:
            least = "any" if name == "memory_limit" else "what the target has"
            expected = f"a number of bytes up to {MOST_BYTES:,}; 0 for {least}"
            raise _wrong(f"{name} is {getattr(options, name)}", expected)
    if options.progress is not None and not callable(options.progress):
        raise _wrong(f"progress is {options.progress!r}", "a function of done, total and what")


def quantization(options: Options) -> tuple[int, int] | None:
    """Return the bits of weights, and how many terms of a sum have a scale (0: all of them); None if they stay floats.

    Raises
    ------
    CompileError
        If ``quantize_weights`` is none of its forms.
    """
    text = options.quantize_weights
    if text == "none":
        return None
    name, colon, terms = text.partition(":")
    whole = terms.isascii() and terms.isdigit() and len(terms) < 10 and int(terms) % 8 == 0 and int(terms) > 0
    if name not in QUANTIZED or (colon and not whole):
        expected = f"none, {' or '.join(QUANTIZED)}; with the terms that have a scale, a multiple of 8: int4:64"
        raise _wrong(f"quantize_weights is {text!r}"[:80], expected)
    return QUANTIZED[name], int(terms or 0)


def _are_sizes(specialize: Any) -> bool:
    """Tell whether ``specialize`` maps names to collections of integers, of Python or of NumPy."""
    if not isinstance(specialize, Mapping) or not all(isinstance(name, str) for name in specialize):
        return False
    kept = all(isinstance(sizes, Collection) and not isinstance(sizes, str) for sizes in specialize.values())
    numbers = [n for sizes in specialize.values() for n in sizes] if kept else []
    return kept and all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers)


def _are_arguments(bind: Any) -> bool:
    """Tell whether ``bind`` is a sequence of names and numbers."""
    if not isinstance(bind, Sequence) or isinstance(bind, str | bytes):
        return False
    return all((isinstance(x, str) and x) or (isinstance(x, int) and not isinstance(x, bool) and x >= 0) for x in bind)


def _are_names(devices: Any) -> bool:
    """Tell whether ``devices`` maps names to names."""
    if not isinstance(devices, Mapping):
        return False
    return all(isinstance(name, str) and name for pair in devices.items() for name in pair)


def _wrong(message: str, hint: str) -> CompileError:
    return CompileError.at(UNKNOWN, message, hint=hint)
