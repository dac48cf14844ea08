"""What the compiler knows about the machines it compiles for."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from aotc.diagnostics import UNKNOWN, CompileError
from aotc.target_gpus import MULTIPROCESSORS, Multiprocessor
from aotc.vmfb.host.machine import SCALABLE, TILES, cpu_features, is_slow, tiles_permitted


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to compile for.

    Attributes
    ----------
    name : str
        As in ``--target`` and in the bundle, e.g. ``cpu:x86-64-v4``.
    kind : str
        ``cpu`` or ``cuda``.
    cpu : str
        LLVM's name of the processor, or ``sm_90a``; ``compute_80`` for every GPU from that on.
    features : tuple of str
        CPU features that the machine must have, as ``/proc/cpuinfo`` names them.
    llvm_features : str
        Passed to LLVM's target machine.
    triple : str
        LLVM triple.
    vector_bytes : int
        Width of a SIMD register.
    registers : int
        SIMD registers.
    l1, l2 : int
        Data cache bytes of one core.
    stack : int
        Bytes that the arrays of a kernel may take on a thread's stack, or in the memory of a GPU's thread.
    shared_memory : int
        Bytes of shared memory that a CUDA block may have if it asks for them when it is launched.
    static_shared : int
        Bytes of shared memory that it may have without asking.
    untried : bool
        Has none of its code ever run?
    """

    name: str
    kind: str
    cpu: str
    features: tuple[str, ...] = ()
    llvm_features: str = ""
    triple: str = "x86_64-unknown-linux-gnu"
    vector_bytes: int = 64
    registers: int = 32
    l1: int = 32 << 10
    l2: int = 1 << 20
    stack: int = 32 << 10
    shared_memory: int = 0
    static_shared: int = 48 << 10
    untried: bool = False

    def limited(self, stack: int, shared_memory: int) -> Target:
        """Return the target with at most so many bytes of stack and of shared memory; 0 changes nothing."""
        stack = min(self.stack, stack or self.stack)
        shared_memory = min(self.shared_memory, shared_memory or self.shared_memory)
        if (stack, shared_memory) == (self.stack, self.shared_memory):
            return self  # so it is for each pass of nearly all compilations
        return replace(self, stack=stack, shared_memory=shared_memory)

    @property
    def shared(self) -> int:
        """The bytes of shared memory that a CUDA block may have without asking for them."""
        return min(self.shared_memory, self.static_shared)

    def of(self, device: str) -> Target:
        """Return what code for a device of the model is compiled for."""
        return self

    @property
    def multiprocessor(self) -> Multiprocessor:
        """What a multiprocessor of the GPU holds."""
        return MULTIPROCESSORS[self.cpu]

    @property
    def portable(self) -> bool:
        """Is its code PTX, which a GPU's driver compiles, and not a cubin?"""
        return self.cpu.startswith("compute_")

    @property
    def has_ampere(self) -> bool:
        """Return True if the GPU has the instructions of compute capability 8.0.

        These are copies to shared memory in the background, the tensor cores' m16n8k8 and larger, bf16, TF32, f64,
        and ``max`` and ``min`` that return NaN.
        """
        return self.kind == "cuda" and int(self.cpu.rpartition("_")[2].strip("a")) >= 80

    @property
    def has_fp8(self) -> bool:
        """Have the GPU's tensor cores floats of 8 bits? They came with compute capability 8.9."""
        return self.kind == "cuda" and not self.portable and int(self.cpu.strip("sm_a")) >= 89

    @property
    def has_wide_f64(self) -> bool:
        """Has the GPU instructions that multiply 16 rows of f64? They came with compute capability 9.0."""
        return self.kind == "cuda" and not self.portable and int(self.cpu.strip("sm_a")) >= 90

    @property
    def lacks(self) -> frozenset[str]:
        """The instructions that kernels must do without, of :data:`_NEEDS`: for them LLVM would call a C library."""
        if not self.triple.startswith("x86_64") or self.kind != "cpu":
            return frozenset()
        return frozenset(name for name, feature in _NEEDS.items() if feature not in self.features)

    @property
    def has_masks(self) -> bool:
        """Have instructions of the CPU's vectors masks, so that the last turns of a loop are one?"""
        return not _MASKS.isdisjoint(self.features)

    @property
    def sve_length(self) -> int:
        """The length of vectors of SVE in 128 bits, which the machine's must be exactly; 0: the target does without."""
        return self.vector_bytes // 16 if SCALABLE in self.features else 0

    @property
    def units(self) -> frozenset[str]:
        """The forms of register tiles that have an instruction for several terms: 2 of ``bf16``, 4 of ``i8``."""
        return frozenset(form for form, names in _UNITS.items() if names & set(self.features))

    @property
    def matrices(self) -> frozenset[str]:
        """The forms of register tiles that are multiplied as whole matrices: 16 x 16 sums by an instruction."""
        return frozenset(form for form, feature in _MATRICES.items() if feature in self.features)


@dataclass(frozen=True, slots=True)
class Mix(Target):
    """Machines of several kinds that work on one program.

    Attributes
    ----------
    devices : tuple of (str, Target)
        By the model's names of devices; the empty one is for those that nobody named.
    """

    devices: tuple[tuple[str, Target], ...] = ()

    def of(self, device: str) -> Target:
        """Return what code for a device of the model is compiled for."""
        known = dict(self.devices)
        return known.get(device, known[""])

    def limited(self, stack: int, shared_memory: int) -> Target:
        """Return the mix with each of its targets limited."""
        return replace(self, devices=tuple((name, t.limited(stack, shared_memory)) for name, t in self.devices))


# Instructions that x86 has only with a CPU feature and other architectures always have: fused multiply-add, and
# conversions of f16.
_NEEDS = {"fma": "fma", "f16": "f16c"}

_UNITS = {"bf16": {"avx512_bf16", "bf16"}, "i8": {"avx512_vnni", "avx_vnni", "asimddp", SCALABLE}}
_MATRICES = {"bf16": "amx_bf16", "i8": "amx_int8"}

_MASKS = frozenset({"avx512f", SCALABLE})  # features with which vector instructions have masks
_V3 = ("abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")  # abm: lzcnt, which older processors decode as bsr
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

# Only with this processor's scheduling model does LLVM schedule register tiles without spills. Its features beyond
# x86-64-v4 are switched off.
_V4_MODEL = "sapphirerapids"
_V4_WITHOUT = (
    "prefer-256-bit", "amx-tile", "amx-int8", "amx-bf16", "avx512fp16", "avx512bf16", "avx512vbmi", "avx512vbmi2",
    "avx512ifma", "avx512bitalg", "avx512vpopcntdq", "avxvnni", "gfni", "vaes", "vpclmulqdq", "sha", "serialize",
    "uintr", "waitpkg", "movdiri", "movdir64b", "enqcmd", "tsxldtrk", "ptwrite", "cldemote", "shstk", "pconfig",
    "wbnoinvd",
)  # fmt: skip
_V4_FEATURES = ",".join(f"-{name}" for name in _V4_WITHOUT)
_BF16_FEATURES = ",".join(f"-{name}" for name in _V4_WITHOUT if name != "avx512bf16")
_SHORT = (*_V3, "avx_vnni")
_AMX = ("avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
_AMX_FEATURES = ",".join(f"-{name}" for name in _V4_WITHOUT if name != "avx512bf16" and not name.startswith("amx-"))


def _gpu(name: str, untried: bool = False) -> Target:
    """Return the target of GPUs of an architecture."""
    held = MULTIPROCESSORS[name]
    most = held.shared - held.reserved
    return Target(f"cuda:{name}", "cuda", name, stack=2 << 10, shared_memory=most, untried=untried)


_AARCH64 = {"asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", SCALABLE: "sve"}
"""LLVM's names of features by Linux's; what is of SVE and of another one LLVM has with both."""


def _aarch64(name: str, *features: str, vector_bytes: int = 16) -> Target:
    """Return the target of AArch64 processors with features, named as by Linux."""
    more = ",".join(f"+{_AARCH64[feature]}" for feature in features if feature in _AARCH64)
    return Target(f"cpu:aarch64{name}", "cpu", "generic", features, more, "aarch64-unknown-linux-gnu", vector_bytes)


def _sve(bits: int, *features: str) -> Target:
    """Return the target of AArch64 processors whose vectors of SVE have so many bits."""
    return _aarch64(f"-sve{bits}", "asimd", SCALABLE, f"{SCALABLE}{bits}", *features, vector_bytes=bits // 8)


MIX = "mix"
"""The kind of a target, and of a variant, whose devices are of several targets or have memory of their own."""

TARGETS = {
    t.name: t
    for t in (
        Target("cpu:x86-64-v2", "cpu", "x86-64-v2", ("sse4_2", "ssse3", "popcnt"), vector_bytes=16, registers=16),
        Target("cpu:x86-64-v3", "cpu", "x86-64-v3", _V3, vector_bytes=32, registers=16),
        Target("cpu:x86-64-v3-vnni", "cpu", "x86-64-v3", _SHORT, "+avxvnni", vector_bytes=32, registers=16),
        Target("cpu:x86-64-v4", "cpu", _V4_MODEL, _V4, f"{_V4_FEATURES},-avx512vnni"),
        Target("cpu:x86-64-v4-vnni", "cpu", _V4_MODEL, (*_V4, "avx512_vnni"), _V4_FEATURES),
        Target("cpu:x86-64-v4-bf16", "cpu", _V4_MODEL, (*_V4, "avx512_vnni", "avx512_bf16"), _BF16_FEATURES),
        Target("cpu:x86-64-amx", "cpu", _V4_MODEL, (*_V4, *_AMX), _AMX_FEATURES, l2=2 << 20),
        _aarch64("", "asimd"),
        _aarch64("-dotprod", "asimd", "asimddp"),
        _aarch64("-bf16", "asimd", "asimddp", "i8mm", "bf16"),
        _sve(256, "asimddp", "i8mm", "bf16", "svei8mm", "svebf16"),
        _sve(512),
        _gpu("sm_75", untried=True),
        _gpu("compute_80"),
        _gpu("sm_80"),
        _gpu("sm_86"),
        _gpu("sm_89"),
        _gpu("sm_90a"),
        _gpu("sm_100", untried=True),
        _gpu("sm_120", untried=True),
    )
}

OTHER_NAMES = {"cuda": "cuda:sm_90a", "cuda:sm_90": "cuda:sm_90a"}
"""What else targets may be called; every GPU of compute capability 9.0 has what ``sm_90a`` adds to ``sm_90``."""
_DROPPED = frozenset(f"cuda:{kind}_{n}" for kind in ("sm", "compute") for n in (50, 52, 53, 60, 61, 62, 70, 72))
_NO_CODE = "CUDA 13, whose libNVVM makes the machine code, dropped GPUs before compute capability 7.5"
_OLDEST = "cuda:sm_75 is the oldest; run on the CPU of that machine with --target=cpu"
PORTABLE = "cpu:portable"
"""All CPU targets: a bundle with code for each, of which a machine takes the best that it runs."""


def host() -> Target:
    """Return the best target that this machine can run."""
    arch = platform.machine()
    have = cpu_features()
    fit = [
        t
        for t in TARGETS.values()
        if t.kind == "cpu"
        and t.triple.startswith(arch.replace("arm64", "aarch64"))
        and have.issuperset(t.features)
        and not is_slow(t.features, have)
        and (TILES not in t.features or tiles_permitted())
    ]
    if not fit:
        raise CompileError.at(UNKNOWN, f"no CPU target fits this machine ({arch})", hint="name one with --target")
    return replace(fit[-1], l2=_cache_bytes(2) or fit[-1].l2)


@cache
def _cache_bytes(level: int) -> int:
    base = "/sys/devices/system/cpu/cpu0/cache"
    for index in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        try:
            with open(f"{base}/{index}/level") as f, open(f"{base}/{index}/size") as g:
                if int(f.read()) == level:
                    return int(g.read().strip().rstrip("K")) << 10
        except (OSError, ValueError):
            continue
    return 0


def combine(targets: Sequence[Target], devices: Mapping[str, str], known: Sequence[Target] = ()) -> tuple[Target, ...]:
    """Return what the variants of a bundle are for: ``targets``, each a mix if ``devices`` of a model are of others.

    Parameters
    ----------
    targets : sequence of Target
        Of the bundle; devices that are not named are of each of them in turn.
    devices : mapping of str to str
        Names of targets by the model's names of devices.
    known : sequence of Target
        To be taken in place of equally named ones: they hold what was measured elsewhere.

    Raises
    ------
    CompileError
        If a device is of several targets.
    """
    measured = {t.name: t for t in (*known, *targets)}
    rows = {name: [measured.get(t.name, t) for t in resolve(target)] for name, target in devices.items()}
    for name, found in rows.items():
        if len(found) > 1:
            raise CompileError.at(UNKNOWN, f"device {name!r} is of several targets, {devices[name]}", hint="name one")
    own = {name: target for name, (target,) in rows.items()}
    if all([target] == list(targets) for target in own.values()):
        return tuple(targets)
    mixes = []
    for target in targets:  # whose name tells the variants apart
        every = (*([target] if len(targets) > 1 else ()), *own.values())
        name = "+".join(dict.fromkeys(t.name for t in every))
        mixes.append(Mix(name, MIX, "", devices=(("", target), *own.items())))
    return tuple(mixes)


def together(targets: Iterable[Target]) -> Target:
    """Return what stands for CPU devices of one program: code that all of them run is for the least of ``targets``.

    The machine must have the features of each; kernels are compiled for the targets of their own devices.
    """
    rows = list(dict.fromkeys(targets))
    if len(rows) == 1:
        return rows[0]
    base = min(rows, key=lambda t: len(t.features))
    features = tuple(dict.fromkeys(name for t in rows for name in t.features))
    return replace(base, name="+".join(t.name for t in rows), features=features)


def least() -> Target:
    """Return the target that every machine of this one's architecture runs: for what only moves bytes."""
    return next(t for t in TARGETS.values() if t.kind == "cpu" and t.triple == host().triple)


def host_beside(targets: Iterable[Target], asked: str = "") -> Target:
    """Return the target of what runs on the host of a GPU: ``asked``, else the least CPU one of ``targets``, else v3.

    Raises
    ------
    CompileError
        If ``asked`` is no CPU target, or several.
    """
    if asked:
        found = resolve(asked)
        if [t.kind for t in found] != ["cpu"]:
            hint = f"one of {', '.join(['cpu', *(t.name for t in TARGETS.values() if t.kind == 'cpu')])}"
            raise CompileError.at(UNKNOWN, f"the host's target is {asked!r}", hint=hint)
        return TARGETS[found[0].name]
    cpus = [t for t in targets if t.kind == "cpu"]
    if cpus:
        return TARGETS[min(cpus, key=lambda t: len(t.features)).name]
    return TARGETS[_HOSTS.get(platform.machine(), "cpu:x86-64-v3")]


_HOSTS = dict.fromkeys(("aarch64", "arm64"), "cpu:aarch64")
"""The targets of hosts by machine: what a machine with a GPU has, whichever compiles."""


def check_mix(targets: Mapping[str, Target]) -> None:
    """Refuse devices that cannot work on one program; ``targets`` are theirs by name.

    Raises
    ------
    CompileError
        If CPU devices are of different architectures: they are the same processor.
    """
    cpus = {name: t for name, t in targets.items() if t.kind == "cpu"}
    if len({t.triple for t in cpus.values()}) > 1:
        listed = ", ".join(f"{name} is {t.name}" for name, t in cpus.items())
        hint = "--device NAME=TARGET with targets of one architecture; devices that are not named take --target"
        raise CompileError.at(UNKNOWN, f"CPU devices of one model are of different architectures: {listed}", hint=hint)


def resolve(name: str) -> tuple[Target, ...]:
    """Return the targets that ``--target name`` means.

    Raises
    ------
    CompileError
        If a name is unknown; the message lists the known ones.
    """
    found = []
    for part in (OTHER_NAMES.get(p.strip(), p.strip()) for p in name.split(",")):
        if part in ("cpu", "cpu:host"):
            found.append(host())
        elif part == PORTABLE:
            found += [t for t in TARGETS.values() if t.kind == "cpu"]
        elif part in TARGETS:
            found.append(TARGETS[part])
        elif part in _DROPPED:
            raise CompileError.at(UNKNOWN, f"target {part!r} cannot be compiled for: {_NO_CODE}", hint=_OLDEST)
        else:
            known = ", ".join(["cpu", PORTABLE, *TARGETS])
            raise CompileError.at(UNKNOWN, f"unknown target {part!r}", hint=f"one of {known}")
    return tuple(dict.fromkeys(found))
