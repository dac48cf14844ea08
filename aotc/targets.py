"""Target machines of the compiler: CPUs and GPUs by name, and mixes of several."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from aotc.diagnostics import UNKNOWN, CompileError, name_hint
from aotc.target_gpus import MULTIPROCESSORS, Multiprocessor
from aotc.vmfb.host.machine import SCALABLE, TILES, cpu_features, request_amx_tiles, runs_features_slowly


@dataclass(frozen=True, slots=True)
class Target:
    """A target machine.

    Attributes
    ----------
    name : str
        Name in ``--target`` and in the bundle, for example ``cpu:x86-64-v4``.
    kind : str
        ``cpu`` or ``cuda``.
    cpu : str
        LLVM's name of the processor, or ``sm_90a``; ``compute_80`` stands for every GPU from compute capability 8.0.
    features : tuple of str
        CPU features that the machine must have, named as in ``/proc/cpuinfo``.
    llvm_features : str
        Features for LLVM's target machine.
    triple : str
        LLVM triple.
    vector_bytes : int
        Width of a SIMD register in bytes.
    registers : int
        Number of SIMD registers.
    l1, l2 : int
        Bytes of the data caches of one core.
    stack : int
        Maximum bytes of a kernel's arrays on a thread's stack, or in the local memory of a GPU thread.
    shared_memory : int
        Maximum bytes of shared memory of a CUDA block that requests them at launch.
    static_shared : int
        Maximum bytes of shared memory of a block without such a request.
    untried : bool
        True if code for this target has never been run.
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

    def with_limits(self, stack: int, shared_memory: int) -> Target:
        """Return the target with limits of stack and shared memory in bytes, if lower than its own; 0 keeps a limit."""
        stack = min(self.stack, stack or self.stack)
        shared_memory = min(self.shared_memory, shared_memory or self.shared_memory)
        if (stack, shared_memory) == (self.stack, self.shared_memory):
            return self  # the common case, reached for each pass of nearly all compilations
        return replace(self, stack=stack, shared_memory=shared_memory)

    @property
    def shared(self) -> int:
        """Return the bytes of shared memory of a CUDA block that requests none at launch."""
        return min(self.shared_memory, self.static_shared)

    def for_device(self, device: str) -> Target:
        """Return this target; ``device`` is only used by :class:`Mix`."""
        return self

    @property
    def multiprocessor(self) -> Multiprocessor:
        """Return the resources of the GPU's multiprocessor."""
        return MULTIPROCESSORS[self.cpu]

    @property
    def portable(self) -> bool:
        """Return True if the code is PTX, compiled by the GPU's driver, and not a cubin."""
        return self.cpu.startswith("compute_")

    @property
    def has_ampere(self) -> bool:
        """Return True if the GPU has the instructions of compute capability 8.0.

        These are asynchronous copies to shared memory, the tensor cores' m16n8k8 and larger, bf16, TF32, f64, and
        ``max`` and ``min`` that return NaN.
        """
        return self.kind == "cuda" and int(self.cpu.rpartition("_")[2].strip("a")) >= 80

    @property
    def has_fp8(self) -> bool:
        """Return True if the GPU's tensor cores multiply 8-bit floats (from compute capability 8.9)."""
        return self.kind == "cuda" and not self.portable and int(self.cpu.strip("sm_a")) >= 89

    @property
    def has_wide_f64(self) -> bool:
        """Return True if the GPU has f64 tensor-core instructions of 16 rows (from compute capability 9.0)."""
        return self.kind == "cuda" and not self.portable and int(self.cpu.strip("sm_a")) >= 90

    @property
    def lacks(self) -> frozenset[str]:
        """Return the names of the instructions ``fma`` and ``f16`` that an x86-64 target lacks.

        LLVM would replace such an instruction by a call of a C library.
        """
        if not self.triple.startswith("x86_64") or self.kind != "cpu":
            return frozenset()
        return frozenset(name for name, feature in _NEEDS.items() if feature not in self.features)

    @property
    def has_masks(self) -> bool:
        """Return True if the CPU has masked vector instructions: one iteration then handles a loop's remainder."""
        return not _MASKS.isdisjoint(self.features)

    @property
    def sve_length(self) -> int:
        """Return the SVE vector length in units of 128 bits, which the machine must match exactly; 0 without SVE."""
        return self.vector_bytes // 16 if SCALABLE in self.features else 0

    @property
    def units(self) -> frozenset[str]:
        """Return the dot-product instructions for register tiles: ``bf16`` (2 terms), ``i8`` (4 terms)."""
        return frozenset(form for form, names in _UNITS.items() if names & set(self.features))

    @property
    def matrices(self) -> frozenset[str]:
        """Return the dtypes for which the CPU has matrix instructions (AMX), which update 16 x 16 sums at once."""
        return frozenset(form for form, feature in _MATRICES.items() if feature in self.features)


@dataclass(frozen=True, slots=True)
class Mix(Target):
    """Several targets whose devices run one program together.

    Attributes
    ----------
    devices : tuple of (str, Target)
        Target of each of the model's devices by name; the empty name is for unnamed devices.
    """

    devices: tuple[tuple[str, Target], ...] = ()

    def for_device(self, device: str) -> Target:
        """Return the target of a device of the model, by its name."""
        known = dict(self.devices)
        return known.get(device, known[""])

    def with_limits(self, stack: int, shared_memory: int) -> Target:
        """Return the mix with these limits of stack and shared memory for each target, as for a single target."""
        return replace(self, devices=tuple((name, t.with_limits(stack, shared_memory)) for name, t in self.devices))


# Instructions that x86 has only with a CPU feature and other architectures always have: fused multiply-add, and
# conversions of f16.
_NEEDS = {"fma": "fma", "f16": "f16c"}

_UNITS = {"bf16": {"avx512_bf16", "bf16"}, "i8": {"avx512_vnni", "avx_vnni", "asimddp", SCALABLE}}
_MATRICES = {"bf16": "amx_bf16", "i8": "amx_int8"}

_MASKS = frozenset({"avx512f", SCALABLE})  # features of masked vector instructions
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


def _gpu_target(name: str, untried: bool = False) -> Target:
    """Return the target for a GPU architecture such as ``sm_90``; ``untried`` marks code that has never been run."""
    held = MULTIPROCESSORS[name]
    most = held.shared - held.reserved
    return Target(f"cuda:{name}", "cuda", name, stack=2 << 10, shared_memory=most, untried=untried)


_AARCH64 = {"asimddp": "dotprod", "i8mm": "i8mm", "bf16": "bf16", SCALABLE: "sve"}
"""LLVM's name for each Linux feature name. LLVM derives features that combine SVE with another one from both."""


def _aarch64_target(name: str, *features: str, vector_bytes: int = 16) -> Target:
    """Return the target for AArch64 processors with ``features``, by their Linux names; ``name`` is a suffix."""
    more = ",".join(f"+{_AARCH64[feature]}" for feature in features if feature in _AARCH64)
    return Target(f"cpu:aarch64{name}", "cpu", "generic", features, more, "aarch64-unknown-linux-gnu", vector_bytes)


def _sve_target(bits: int, *features: str) -> Target:
    """Return the target for AArch64 processors with SVE vectors of ``bits`` bits."""
    return _aarch64_target(f"-sve{bits}", "asimd", SCALABLE, f"{SCALABLE}{bits}", *features, vector_bytes=bits // 8)


MIX = "mix"
"""Kind of a target, and of a variant, whose devices have several targets or separate memories."""

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
        _aarch64_target("", "asimd"),
        _aarch64_target("-dotprod", "asimd", "asimddp"),
        _aarch64_target("-bf16", "asimd", "asimddp", "i8mm", "bf16"),
        _sve_target(256, "asimddp", "i8mm", "bf16", "svei8mm", "svebf16"),
        _sve_target(512),
        _gpu_target("sm_75", untried=True),
        _gpu_target("compute_80"),
        _gpu_target("sm_80"),
        _gpu_target("sm_86"),
        _gpu_target("sm_89"),
        _gpu_target("sm_90a"),
        _gpu_target("sm_100", untried=True),
        _gpu_target("sm_120", untried=True),
    )
}

OTHER_NAMES = {"cuda": "cuda:sm_90a", "cuda:sm_90": "cuda:sm_90a"}
"""Aliases of targets; every GPU of compute capability 9.0 has the additions of ``sm_90a`` to ``sm_90``."""
_DROPPED = frozenset(f"cuda:{kind}_{n}" for kind in ("sm", "compute") for n in (50, 52, 53, 60, 61, 62, 70, 72))
_NO_CODE = "CUDA 13, whose libNVVM makes the machine code, dropped GPUs before compute capability 7.5"
_OLDEST = "cuda:sm_75 is the oldest; run on the CPU of that machine with --target=cpu"
PORTABLE = "cpu:portable"
"""All CPU targets: a bundle with code for each; the loader selects the best one that the machine supports."""


def host_target() -> Target:
    """Return the best target that this machine supports."""
    arch = platform.machine()
    have = cpu_features()
    fit = [
        t
        for t in TARGETS.values()
        if t.kind == "cpu"
        and t.triple.startswith(arch.replace("arm64", "aarch64"))
        and have.issuperset(t.features)
        and not runs_features_slowly(t.features, have)
        and (TILES not in t.features or request_amx_tiles())
    ]
    if not fit:
        raise CompileError.at(UNKNOWN, f"no CPU target fits this machine ({arch})", hint="name one with --target")
    return replace(fit[-1], l2=_cache_bytes(2) or fit[-1].l2)


def runs_on_this_machine(target: Target) -> bool:
    """Return True if ``target`` is a CPU whose architecture and features this machine has."""
    machine = platform.machine().replace("arm64", "aarch64")
    return target.kind == "cpu" and target.triple.startswith(machine) and cpu_features().issuperset(target.features)


def target_requirements(target: Target) -> str:
    """Format the processor features that a target needs, and a remark if it is untested."""
    if target.kind == "cpu":
        return " ".join(target.features)
    what = "any NVIDIA GPU from sm_80 on: PTX for its driver" if target.portable else "an NVIDIA GPU"
    return f"{what} (compiled, never run)" if target.untried else what


@cache
def _cache_bytes(level: int) -> int:
    """Return the size in bytes of a data cache of the first core, as Linux reports it; 0 if unknown."""
    base = "/sys/devices/system/cpu/cpu0/cache"
    for index in sorted(os.listdir(base)) if os.path.isdir(base) else ():
        try:
            with open(f"{base}/{index}/level") as f, open(f"{base}/{index}/size") as g:
                if int(f.read()) == level:
                    return int(g.read().strip().rstrip("K")) << 10
        except (OSError, ValueError):
            continue
    return 0


def variant_targets(
    targets: Sequence[Target], devices: Mapping[str, str], known: Sequence[Target] = ()
) -> tuple[Target, ...]:
    """Return the targets of a bundle's variants: ``targets``, or mixes if named ``devices`` have other targets.

    Parameters
    ----------
    targets : sequence of Target
        Targets of the bundle; each variant uses one of them for unnamed devices.
    devices : mapping of str to str
        Target name for each of the model's devices.
    known : sequence of Target
        Targets with measurements from another machine, which replace targets of the same name.

    Raises
    ------
    CompileError
        If a device has several targets.
    """
    measured = {t.name: t for t in (*known, *targets)}
    rows = {name: [measured.get(t.name, t) for t in resolve_targets(target)] for name, target in devices.items()}
    for name, found in rows.items():
        if len(found) > 1:
            raise CompileError.at(UNKNOWN, f"device {name!r} is of several targets, {devices[name]}", hint="name one")
    own = {name: target for name, (target,) in rows.items()}
    if all([target] == list(targets) for target in own.values()):
        return tuple(targets)
    mixes = []
    for target in targets:  # the name distinguishes the variants
        every = (*([target] if len(targets) > 1 else ()), *own.values())
        name = "+".join(dict.fromkeys(t.name for t in every))
        mixes.append(Mix(name, MIX, "", devices=(("", target), *own.items())))
    return tuple(mixes)


def common_cpu_target(targets: Iterable[Target]) -> Target:
    """Return one CPU target for the code that all CPU devices of a program share.

    It is the target with the fewest features, but the machine must have the features of all ``targets``. Kernels are
    compiled for the targets of their own devices.
    """
    rows = list(dict.fromkeys(targets))
    if len(rows) == 1:
        return rows[0]
    base = min(rows, key=lambda t: len(t.features))
    features = tuple(dict.fromkeys(name for t in rows for name in t.features))
    return replace(base, name="+".join(t.name for t in rows), features=features)


def baseline_cpu_target() -> Target:
    """Return the baseline target of this machine's architecture, for code that only moves bytes."""
    return next(t for t in TARGETS.values() if t.kind == "cpu" and t.triple == host_target().triple)


def host_target_of_gpu(targets: Iterable[Target], asked: str = "") -> Target:
    """Return the target of a GPU's host: ``asked``, the CPU of ``targets`` with the fewest features, or a default.

    Raises
    ------
    CompileError
        If ``asked`` is not a CPU target, or names several.
    """
    if asked:
        found = resolve_targets(asked)
        if [t.kind for t in found] != ["cpu"]:
            hint = f"one of {', '.join(['cpu', *(t.name for t in TARGETS.values() if t.kind == 'cpu')])}"
            raise CompileError.at(UNKNOWN, f"the host's target is {asked!r}", hint=hint)
        return TARGETS[found[0].name]
    cpus = [t for t in targets if t.kind == "cpu"]
    if cpus:
        return TARGETS[min(cpus, key=lambda t: len(t.features)).name]
    return TARGETS[_HOSTS.get(platform.machine(), "cpu:x86-64-v3")]


_HOSTS = dict.fromkeys(("aarch64", "arm64"), "cpu:aarch64")
"""Default host target by machine architecture: every machine with a GPU supports it, whichever machine compiles."""


def check_mix(targets: Mapping[str, Target]) -> None:
    """Reject a set of devices that cannot run one program; ``targets`` maps device names to targets.

    Raises
    ------
    CompileError
        If CPU devices have different architectures: all of them are the processor of one machine.
    """
    cpus = {name: t for name, t in targets.items() if t.kind == "cpu"}
    if len({t.triple for t in cpus.values()}) > 1:
        listed = ", ".join(f"{name} is {t.name}" for name, t in cpus.items())
        hint = "--device NAME=TARGET with targets of one architecture; devices that are not named take --target"
        raise CompileError.at(UNKNOWN, f"CPU devices of one model are of different architectures: {listed}", hint=hint)


def resolve_targets(name: str) -> tuple[Target, ...]:
    """Return the targets for ``--target name``.

    Raises
    ------
    CompileError
        If a name is unknown; the message lists the known ones.
    """
    found = []
    for part in (OTHER_NAMES.get(p.strip(), p.strip()) for p in name.split(",")):
        if part in ("cpu", "cpu:host"):
            found.append(host_target())
        elif part == PORTABLE:
            found += [t for t in TARGETS.values() if t.kind == "cpu"]
        elif part in TARGETS:
            found.append(TARGETS[part])
        elif part in _DROPPED:
            raise CompileError.at(UNKNOWN, f"target {part!r} cannot be compiled for: {_NO_CODE}", hint=_OLDEST)
        else:
            hint = name_hint(part, ["cpu", PORTABLE, *TARGETS], "; `aotc targets` lists all")
            raise CompileError.at(UNKNOWN, f"unknown target {part!r}", hint=hint)
    return tuple(dict.fromkeys(found))
