"""Options of the compiler: a frozen dataclass whose fields are the command-line flags, and their checks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

from aotc.diagnostics import UNKNOWN, CallbackFailed, CompileError, name_hint, warn_user
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.byte_sizes import EXAMPLES, parse_byte_count
from aotc.vmfb.result_names import parse_state_pairs

SAID, AUTO = "said", "auto"  # placement of ops: by affinities alone, or by the cost model
REFUSE, DROP = "refuse", "drop"  # treatment of calls back into Python
PRECISIONS = ("model", "bf16", "bf16x3", "highest")  # of f32 matmuls and convolutions
UNPACKED = "unpacked"  # weights in the bundle, addressed by the paths of their arguments
QUANTIZED = {"int8": 8, "int4": 4}  # bits of a weight, by option value
DIRECT, NUMBA = "direct", "numba"  # compilers of CPU kernels: LLVM IR from the loop IR, or Numba's front end
HOST, DEVICE = "host", "device"  # devices that represent JAX's memory kinds, if options name both


def _is_guard_memory_requested() -> bool:
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
        Precision of f32 matmuls and convolutions for which the model requests none. ``model``: f32 on CPUs and TF32 on
        GPUs; ``bf16``: operands rounded to 8 bits; ``bf16x3``: to 16 bits, with three products; ``highest``: f32 on
        GPUs too. Attention as a single op keeps the precision of the model.
    quantize_weights : str
        ``int8`` or ``int4``: large constant operands of matmuls are stored as integers of 8 or 4 bits, with one scale
        per column of the result. After a colon, the number of terms that share a scale (``int4:64``).
    weights : str
        ``inline``, or the path of a safetensors file for the constants. With ``bind``, the place of the examples of
        these arguments, stored by path: that file, or the bundle itself (``unpacked``). Its functions then take only
        the other arguments.
    specialize : mapping of str to sequence of int
        Sizes of symbolic dims to compile extra copies of functions for: ``{"b": (1, 8)}``. A ``range`` stands for its
        first and last number and the powers of two between: ``{"b": range(1, 65)}`` for 1, 2, 4, ... 64. Calls of all
        other sizes, also outside of a range, use the general code. A sharded model has these sizes only, each a
        function of its own.
    typical : mapping of str to int
        Typical sizes of symbolic dims: ``{"b": 8}``. General code is planned for them, and ``profile``, ``report`` and
        all other commands assume them. Other dims count as 16.
    bind : sequence of str or int
        Arguments that ``LoadedModule.bind`` receives once, by name, tree (``args[0]`` for ``args[0]['w']``...) or
        number. Values that depend only on them, such as packed weights, are computed there and not in each call.
    state : sequence of str, or mapping of str to str
        Results that are arguments of the next call: ``("cache",)`` if result and argument share that name, else
        ``{"result[0]": "cache"}``. Results may reuse the memory of these arguments, as if they were donated, and
        ``LoadedModule.state`` manages them.
    debug_info : bool
        Store source locations and kernel text in the bundle.
    source : bool
        Store the model itself in the bundle; ``aotc upgrade`` compiles it again.
    cache : bool
        Reuse compiled kernels, and whole bundles that took long to compile, from the cache directory.
    jobs : int
        Number of kernels to compile at the same time, in threads or processes; 0 means one per core.
    verify_each : bool
        After every pass verify the IR and the invariants of the passes so far; then verify each kernel and each later
        stage up to the host program.
    dump_ir : str
        Folder for the IR after every pass, and for kernels and steps; or empty.
    print_after : str
        Name of the pass after which to print the IR; or empty.
    stop_after : str
        Name of the pass after which to stop; or empty.
    reproducer : str
        File for everything that reproduces the compilation, written once the model has been read. If empty, it is
        written only for bugs of the compiler.
    bisect : int
        Skip the optional passes after this number; -1 skips none.
    timings : bool
        Print the time of every pass.
    devices : mapping of str to str
        Names of the model's devices, each with its target: ``{"d0": "cpu:x86-64-v3"}``. Other devices use ``target``.
    default_device : str
        Device for ops and arguments without a placement. Empty: refuse them if there are several devices.
    costs : mapping
        Measured times of kernels (``LoadedModule.profile``), used in place of the predictions of the cost model.
    tuning : mapping
        A record of :func:`aotc.tune`: tuned decisions replace those of the compiler's thresholds. It applies to its
        target; other models may use it too.
    place : str
        ``said``: affinities alone place ops. ``auto``: the cost model places large ops on the devices that the model or
        ``devices`` name.
    max_transfers : int
        Refuse a model that needs more transfers between devices; -1 means no limit.
    host_fallback : bool
        For a GPU alone: run ops without a GPU kernel (LAPACK, custom calls) on the host and transfer values, or refuse
        them.
    host_target : str
        CPU target of these host kernels. Empty: the CPU target of ``target`` with the fewest features, if any, else
        ``cpu:x86-64-v3`` or ``cpu:aarch64``, by this machine's architecture.
    memory_limit : int
        Maximum number of bytes for a call on one thread, besides arguments, results and weights; 0 means no limit.
        Larger values are computed in parts, recomputed, or moved from a GPU to the host; else the model is refused. In
        a program for the CPU and GPUs each memory has this limit. Limits may also be text: ``"64MB"``.
    stack_limit, shared_memory_limit : int
        Maximum number of bytes for a kernel's arrays on a thread's stack, and in the shared memory of a GPU's block, if
        below the target's; 0 means the target's.
    callbacks : str
        Calls back into Python without a registered function: ``refuse`` them, or ``drop`` those with unused results.
    kernel_compiler : str
        ``direct``: emit the LLVM IR of a kernel from the loop IR. ``numba``: print the kernel as a Python function
        and compile it by Numba's front end (``numba.cuda`` for GPUs), much slower; an independent check of
        ``direct``. Templates for tensor cores are the same by either.
    replace : mapping of str to function, str or path
        Python functions in place of kernels, with the parameters that ``aotc dump --kernels -o`` prints:
        ``{"k3_row": my_kernel}``, or a module (its path, or its text) that defines ``k3_row``. Numba compiles the
        function (``numba.cuda`` for GPUs). It is refused if its results differ from the kernel's on random arguments; a
        function for GPUs is tried on the CPU, and on a GPU if there is one. Kernels of templates cannot be replaced.
    about : mapping of str to str
        Facts about the model for its users, stored in the bundle: ``{"license": "MIT", "source": "https://..."}``.
        ``Bundle.about`` and ``aotc inspect`` show them.
    guard : bool
        Leave guard pages between all blocks of memory, which ``AOTC_GUARD=1`` protects when the bundle runs. The
        default is the value of ``AOTC_GUARD`` at compile time.
    progress : callable or None
        ``progress(done, total, what)`` is called as compilation advances.
    """

    target: str = "cpu"
    opt_level: int = 2
    matmul_precision: str = PRECISIONS[0]
    quantize_weights: str = "none"
    weights: str = "inline"
    specialize: Mapping[str, Sequence[int]] = field(default_factory=dict)
    typical: Mapping[str, int] = field(default_factory=dict)
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
    tuning: Mapping[str, Any] = field(default_factory=dict)
    place: str = SAID
    max_transfers: int = -1
    host_fallback: bool = True
    host_target: str = ""
    memory_limit: int = 0
    stack_limit: int = 0
    shared_memory_limit: int = 0
    callbacks: str = REFUSE
    kernel_compiler: str = DIRECT
    replace: Mapping[str, str | os.PathLike[str] | Callable[..., Any]] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    guard: bool = field(default_factory=_is_guard_memory_requested)
    progress: Callable[[int, int, str], None] | None = None

    def replaced(self, kind: str) -> dict[str, str]:
        """Return the source modules that replace kernels of a kind of target, by kernel name.

        Keys of the option are ``k0``, or ``cuda/k0`` for one kind only.
        """
        rows = {name.rpartition("/")[::2]: str(module) for name, module in self.replace.items()}
        return {name: module for (own, name), module in rows.items() if own in ("", kind)}

    def advance(self, done: int, total: int, what: str) -> None:
        """Report the progress of compilation to ``progress``.

        Raises
        ------
        CallbackFailed
            If it raises; :func:`aotc.guard.reraise_user_errors` re-raises its exception unchanged.
        """
        if self.progress is not None:
            try:
                self.progress(done, total, what)
            except BaseException as error:
                raise CallbackFailed(error) from error


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`Options`, as keywords of :func:`aotc.compile`."""

    target: str
    opt_level: int
    matmul_precision: str
    quantize_weights: str
    weights: str | os.PathLike[str]
    specialize: Mapping[str, Collection[int]]
    typical: Mapping[str, int]
    bind: Sequence[str | int]
    state: Sequence[str] | Mapping[str, str]
    debug_info: bool
    source: bool
    cache: bool
    jobs: int
    verify_each: bool
    dump_ir: str | os.PathLike[str]
    print_after: str
    stop_after: str
    reproducer: str | os.PathLike[str]
    bisect: int
    timings: bool
    devices: Mapping[str, str]
    default_device: str
    costs: Mapping[str, Any]
    tuning: Mapping[str, Any]
    place: str
    max_transfers: int
    host_fallback: bool
    host_target: str
    memory_limit: int | str
    stack_limit: int | str
    shared_memory_limit: int | str
    callbacks: str
    kernel_compiler: str
    replace: Mapping[str, str | os.PathLike[str] | Callable[..., Any]]
    about: Mapping[str, str]
    guard: bool
    progress: Callable[[int, int, str], None] | None


WATCHED = frozenset({"dump_ir", "print_after", "stop_after", "timings", "verify_each"})
"""Options that observe a compilation."""
OF_THE_RUN = frozenset({"progress", "jobs", "cache", "reproducer"}) | WATCHED
"""Options that change no byte of a bundle; any other option is assumed to change some."""

_KINDS = {bool: (bool,), int: (Integral,), str: (str,)}
"""Permitted types of an option, by the type of its default."""
_PATHS = ("weights", "dump_ir", "reproducer")
"""Text options that may also be paths."""
_BYTES = ("memory_limit", "stack_limit", "shared_memory_limit")
"""Options in bytes, which may also be text."""


def with_byte_limits(options: Options) -> Options:
    """Convert sizes in ``options`` such as ``64MB`` to numbers of bytes.

    Raises
    ------
    CompileError
        If a value is not a size.
    """
    found = {name: getattr(options, name) for name in _BYTES}
    for name, value in found.items():
        try:
            found[name] = parse_byte_count(value)
        except ValueError:
            raise _option_error(f"{name} is {value!r}"[:80], EXAMPLES) from None
    return replace(options, **found)


def sizes_of_range(sizes: range) -> tuple[int, ...]:
    """Return the sizes that a range of ``specialize`` means: its bounds, and the powers of two between."""
    if not sizes or sizes.step != 1:
        return tuple(sizes)
    first, last = sizes[0], sizes[-1]
    powers = (1 << n for n in range(last.bit_length()))
    return tuple(dict.fromkeys((first, *(n for n in powers if first < n < last), last)))


def with_listed_sizes(options: Options) -> Options:
    """Replace the ranges of ``specialize`` by lists of sizes."""
    if not isinstance(options.specialize, Mapping):
        return options  # refused later
    rows = options.specialize.items()
    return replace(options, specialize={k: sizes_of_range(v) if isinstance(v, range) else v for k, v in rows})


RENAMED = MappingProxyType({
    "locate-extremes": "vectorize-argmax",
    "share-rows": "softmax-by-reciprocal",
    "spread-work": "parallelize-gpu",
})  # fmt: skip
"""Passes renamed since earlier versions: old name, new name."""


def with_current_passes(options: Options) -> Options:
    """Replace old names of passes in ``stop_after`` and ``print_after`` by current names."""
    current: dict[str, Any] = {}
    for name in ("stop_after", "print_after"):
        value = getattr(options, name)
        if isinstance(value, str) and value in RENAMED:
            current[name] = RENAMED[value]
            warn_user(f"{name}: the pass {value} is now called {RENAMED[value]}")
    return replace(options, **current)


# Maximum number of compiler processes or threads. A process takes 200 MB; a mistyped ten thousand would exhaust memory.
MOST_PROCESSES = 256
# Maximum of a byte limit: bundles and kernels store sizes in signed 64-bit integers.
MOST_BYTES = (1 << 63) - 1


def check_options(options: Options, passes: Sequence[str]) -> None:
    """Check the values of all options; ``passes`` are the valid names for ``stop_after`` and ``print_after``.

    Raises
    ------
    CompileError
        If an option has the wrong type or a value outside its range, if a name is unknown, or if a path is not of the
        kind that the option needs.
    """
    for f in fields(options):
        value = getattr(options, f.name)
        path = f.name in _PATHS and isinstance(value, os.PathLike)
        kind = type(f.default)
        if not path and (not isinstance(value, _KINDS.get(kind, object)) or (kind is int and isinstance(value, bool))):
            raise _option_error(f"{f.name} is {value!r}", f"a value of type {kind.__name__}")
    if not 0 <= options.jobs <= MOST_PROCESSES:
        raise _option_error(f"jobs is {options.jobs}", f"at most {MOST_PROCESSES} processes; 0 is one per core")
    if options.opt_level not in range(4):
        raise _option_error(f"opt_level is {options.opt_level!r}", "0, 1, 2 or 3")
    if options.matmul_precision not in PRECISIONS:
        raise _option_error(f"matmul_precision is {options.matmul_precision!r}", f"one of {', '.join(PRECISIONS)}")
    weight_quantization(options)
    names = list(dict.fromkeys(passes))
    for name in filter(None, (options.stop_after, options.print_after)):
        if name not in names:
            raise _option_error(f"no pass {name!r}", name_hint(name, names))
    if options.callbacks not in (REFUSE, DROP):
        raise _option_error(f"callbacks is {options.callbacks!r}", f"{REFUSE} or {DROP}")
    _check_kernels(options)
    if options.weights not in ("inline", UNPACKED) and not os.fspath(options.weights).endswith(".safetensors"):
        raise _option_error(f"weights is {options.weights!r}", "inline, or a path.safetensors")
    for name in _PATHS:
        if "\0" in os.fsdecode(getattr(options, name)):
            raise _option_error(f"{name} is {getattr(options, name)!r}", "a path, which has no null characters")
    folder = Path(options.dump_ir)
    if options.dump_ir and any(p.exists() and not p.is_dir() for p in (folder, *folder.parents)):
        raise _option_error(f"dump_ir is {options.dump_ir!r}, which is not a folder", "a new folder")
    _check_sizes(options)
    if not _are_about_texts(options.about):
        raise _option_error(f"about is {options.about!r}"[:80], "texts by keys: {'license': 'MIT'}")
    if not _are_bound_arguments(options.bind):
        raise _option_error(f"bind is {options.bind!r}", "names or numbers of arguments: ('w', 'args[1]', 2)")
    try:
        parse_state_pairs(options.state)
    except CallError as error:
        raise CompileError.at(UNKNOWN, str(error)) from None
    if not _are_device_names(options.devices):
        raise _option_error(f"devices is {options.devices!r}", "targets by the names of devices: {'d0': 'cpu'}")
    if options.place not in (SAID, AUTO):
        raise _option_error(f"place is {options.place!r}", f"{SAID} or {AUTO}")
    if options.max_transfers < -1:
        raise _option_error(f"max_transfers is {options.max_transfers}", "a number, or -1 for any")
    for name in _BYTES:
        if not 0 <= getattr(options, name) <= MOST_BYTES:
            least = "any" if name == "memory_limit" else "what the target has"
            expected = f"a number of bytes up to {MOST_BYTES:,}; 0 for {least}"
            raise _option_error(f"{name} is {getattr(options, name)}", expected)
    if options.progress is not None and not callable(options.progress):
        raise _option_error(f"progress is {options.progress!r}", "a function of done, total and what")


def _check_sizes(options: Options) -> None:
    """Check the options for symbolic dims."""
    if not _are_specialized_sizes(options.specialize):
        raise _option_error(f"specialize is {options.specialize!r}", "sizes by the names of dims: {'b': (1, 8)}")
    typical = options.typical
    if not isinstance(typical, Mapping) or not _are_specialized_sizes({k: (n,) for k, n in typical.items()}):
        raise _option_error(f"typical is {options.typical!r}"[:80], "a size by the name of each dim: {'b': 8}")


def _check_kernels(options: Options) -> None:
    """Check the options that control the compilation of kernels."""
    if options.kernel_compiler not in (DIRECT, NUMBA):
        raise _option_error(f"kernel_compiler is {options.kernel_compiler!r}", f"{DIRECT} or {NUMBA}")
    if not isinstance(options.replace, Mapping) or not all(
        isinstance(name, str) and (isinstance(module, str | os.PathLike) or callable(module))
        for name, module in options.replace.items()
    ):
        expected = "functions or modules by the names of kernels: {'k3_row': 'my.py'}"
        raise _option_error(f"replace is {options.replace!r}"[:80], expected)


def weight_quantization(options: Options) -> tuple[int, int] | None:
    """Parse ``quantize_weights``: bits per weight, and terms that share a scale (0: all); None for float weights.

    Raises
    ------
    CompileError
        If ``quantize_weights`` is malformed.
    """
    text = options.quantize_weights
    if text == "none":
        return None
    name, colon, terms = text.partition(":")
    whole = terms.isascii() and terms.isdigit() and len(terms) < 10 and int(terms) % 8 == 0 and int(terms) > 0
    if name not in QUANTIZED or (colon and not whole):
        expected = f"none, {' or '.join(QUANTIZED)}; with the terms that have a scale, a multiple of 8: int4:64"
        raise _option_error(f"quantize_weights is {text!r}"[:80], expected)
    return QUANTIZED[name], int(terms or 0)


def _are_specialized_sizes(specialize: Any) -> bool:
    """Return True if ``specialize`` maps names to collections of integers (Python's or NumPy's)."""
    if not isinstance(specialize, Mapping) or not all(isinstance(name, str) for name in specialize):
        return False
    kept = all(isinstance(sizes, Collection) and not isinstance(sizes, str) for sizes in specialize.values())
    numbers = [n for sizes in specialize.values() for n in sizes] if kept else []
    return kept and all(isinstance(n, Integral) and not isinstance(n, bool) for n in numbers)


def _are_bound_arguments(bind: Any) -> bool:
    """Return True if ``bind`` is a sequence of names and numbers."""
    if not isinstance(bind, Sequence) or isinstance(bind, str | bytes):
        return False
    return all((isinstance(x, str) and x) or (isinstance(x, int) and not isinstance(x, bool) and x >= 0) for x in bind)


def _are_about_texts(about: object) -> bool:
    """Return True if ``about`` maps strings to strings."""
    if not isinstance(about, Mapping) or not all(isinstance(text, str) for pair in about.items() for text in pair):
        return False
    try:
        return all(key and f"{key}{text}".encode() for key, text in about.items())
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _are_device_names(devices: Any) -> bool:
    """Return True if ``devices`` maps strings to strings."""
    if not isinstance(devices, Mapping):
        return False
    return all(isinstance(name, str) and name for pair in devices.items() for name in pair)


def _option_error(message: str, hint: str) -> CompileError:
    return CompileError.at(UNKNOWN, message, hint=hint)
