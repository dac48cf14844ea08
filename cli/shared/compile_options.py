"""Options shared by ``aotc compile`` and ``aotc lint``, and the display of warnings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import typer

TARGET_HELP = "cpu (this machine), or names from `aotc targets`, with commas."
MESH_HELP = (
    "Axes of the mesh of a sharded model, as data=2,model=4: names for a model without them. The product of the sizes "
    "is the number of its devices."
)
SPECIALIZE_HELP = (
    "b=1,8: also compile code for these sizes of dim b. b=1..64: for the bounds and the powers of two between; "
    "b=1:8:64: for the least, typical and largest size, as --specialize b=1,8,64 --typical b=8. Calls of other sizes "
    "use the general code; a sharded model has these sizes only."
)
TYPICAL_HELP = "b=8: the size of dim b to plan the general code for, and that all commands assume; default: 16."
BIND_HELP = "w, args[0] or 2: arguments that `module.bind` receives once; what depends only on them is computed once."
STATE_HELP = "cache, or result[0]=cache: a result that is an argument of the next call, in place; see `module.state`."
DEVICE_HELP = "d0=cpu: the target of a device that the model names."
DEFAULT_DEVICE_HELP = "The device of ops without one, in a model that names several."
PLACE_HELP = "said: the model's affinities place ops on devices; auto: the cost model also places large ops."
PRECISION_HELP = "Precision of f32 matmuls; highest: f32 on GPUs too."
QUANTIZE_HELP = "Quantize large constant matrices; int4:64 has a scale for each 64 terms."
COSTS_HELP = "A record of `aotc profile`, or a bundle with one: measured times replace the cost model's."
TUNING_HELP = "A record of `aotc tune`, or a tuned bundle: tuned decisions replace the compiler's thresholds."
PORTABLE_HELP = "Compile for all CPU targets; a machine uses the best that it can run. Same as --target=cpu:portable."
TRANSFERS_HELP = "Refuse a model that needs more transfers between devices; -1: any number."
FALLBACK_HELP = "Run ops without a GPU kernel (LAPACK, custom calls) on the CPU, or make that an error."
HOST_TARGET_HELP = "CPU target of these ops; default: one of --target, or cpu:x86-64-v3 (cpu:aarch64 on ARM)."
MEMORY_HELP = "Maximum memory of a call on each device, without arguments, results and weights, such as 64MB; 0: any."
STACK_HELP = "Most stack for a kernel's arrays in a thread, such as 32kB, if less than the target's; 0: the target's."
SHARED_HELP = "Most shared memory of a GPU block, such as 48kB, if less than the target's; 0: the target's."
REPRODUCER_HELP = "Write model, options and versions to this file; `aotc compile` accepts it as a model."
COMPILER_HELP = "Compiler of kernels; numba: each kernel through Numba's front end, to check the direct one."
KERNEL_HELP = "k3_row=my.py: your function in place of this kernel, if results agree; see `aotc dump --kernels -o`."
ABOUT_HELP = "KEY=TEXT: licence, provenance or version of the model; `aotc inspect` shows it, `aotc upgrade` keeps it."
CALLBACKS_HELP = "drop: leave out Python callbacks whose results are not used."


def complete_targets(incomplete: str) -> list[str]:
    """Return the targets whose names begin with the last part of ``incomplete``, for shell completion."""
    from aotc.targets import TARGETS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in ("cpu", "cpu:portable", *TARGETS) if name.startswith(last)]


@contextmanager
def warnings_as_sentences() -> Iterator[None]:
    """Print the warnings of the ``with`` block after its success, without the Python source location."""
    with catch_warnings(record=True) as warned:
        simplefilter("always", UserWarning)
        yield
    for message in dict.fromkeys(str(warning.message) for warning in warned):  # one for each target may be equal
        print(f"warning: {message}", file=sys.stderr)


def parse_specialized(texts: list[str]) -> dict[str, tuple[int, ...]]:
    """Parse ``b=1,8`` to ``{"b": (1, 8)}``; ``b=1..64`` and ``b=1:8:64`` are ranges."""
    from aotc.options import sizes_of_range

    found = {}
    for text in texts:
        name, _, sizes = text.partition("=")
        bounds, three = sizes.split(".."), sizes.split(":")
        parts = bounds if len(bounds) == 2 else three if len(three) == 3 else sizes.split(",")
        numbers = [int(n) for n in parts if n.strip().isascii() and n.strip().isdigit() and len(n) < 20]
        is_list = len(bounds) == len(three) == 1
        if not name or len(numbers) != len(parts) or not (is_list or numbers == sorted(numbers)):
            expected = "NAME=SIZE,SIZE..., NAME=FIRST..LAST or NAME=LEAST:TYPICAL:LARGEST"
            raise typer.BadParameter(f"{text[:60]!r}: expected {expected}", param_hint="--specialize")
        is_range = len(bounds) == 2
        found[name] = sizes_of_range(range(numbers[0], numbers[1] + 1)) if is_range else tuple(dict.fromkeys(numbers))
    return found


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``data=2,model=4`` to ``{"data": 2, "model": 4}``; an empty text gives an empty dict."""
    found: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = (word.strip() for word in part.partition("="))
        is_size = size.isascii() and size.isdigit() and len(size) < 10 and int(size) > 0
        if not name or not is_size or name in found:
            message = f"{text[:60]!r}: expected AXIS=SIZE,AXIS=SIZE... with different names and sizes from 1 on"
            raise typer.BadParameter(message, param_hint="--mesh")
        found[name] = int(size)
    return found


def parse_typical(specialize: list[str], texts: list[str]) -> dict[str, int]:
    """Parse ``--specialize b=1:8:64`` or ``--typical b=8`` to ``{"b": 8}``; the latter prevails."""
    found = {}
    for text in specialize:
        name, _, sizes = text.partition("=")
        if sizes.count(":") == 2:
            found[name] = int(sizes.split(":")[1])
    for text in texts:
        name, _, size = text.partition("=")
        if not name or not (size.isascii() and size.isdigit() and len(size) < 20):
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=SIZE", param_hint="--typical")
        found[name] = int(size)
    return found


def parse_about(texts: list[str]) -> dict[str, str]:
    """Parse ``license=MIT`` to ``{"license": "MIT"}``."""
    found = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key.strip() or not equals:
            raise typer.BadParameter(f"{text[:60]!r}: expected KEY=TEXT", param_hint="--about")
        found[key.strip()] = value
    return found


def replaced_kernels(texts: list[str]) -> dict[str, str]:
    """Parse ``k3_row=my.py`` to ``{"k3_row": "my.py"}``."""
    found = {}
    for text in texts:
        name, _, module = text.partition("=")
        if not name or not module:
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=FILE.py", param_hint="--kernel")
        found[name] = module
    return found


def parse_bytes(text: str, option: str = "--memory-limit") -> int:
    """Parse the value of an option in bytes; 0 for an empty string."""
    from aotc.vmfb.host.byte_sizes import parse_byte_count

    try:
        return parse_byte_count(text) if text else 0
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def portable_target(target: str, portable: bool) -> str:
    """Return the target that ``--target`` and ``--portable`` select."""
    from aotc.targets import PORTABLE

    if portable and target not in ("cpu", PORTABLE):
        message = f"it is --target={PORTABLE}: leave out --target={target}, or write --target={PORTABLE},{target}"
        raise typer.BadParameter(message, param_hint="--portable")
    return PORTABLE if portable else target


def parse_devices(texts: list[str]) -> dict[str, str]:
    """Parse ``d0=cpu`` to ``{"d0": "cpu"}``."""
    devices = {}
    for text in texts:
        name, _, target = text.partition("=")
        if not name or not target:
            raise typer.BadParameter(f"{text[:60]!r}: expected NAME=TARGET", param_hint="--device")
        if name in devices:
            message = f"device {name} is given twice, as {devices[name]} and as {target}"
            raise typer.BadParameter(message, param_hint="--device")
        devices[name] = target
    return devices


def _read_record_or_bundle(
    path: Path, parse: Callable[[bytes], dict[str, Any]], name: str, kind: str, hint: str
) -> dict[str, Any] | bytes:
    """Read a file with a record as JSON; return the record, or the bytes of a file that is a bundle."""
    from aotc.diagnostics import CompileError, Loc
    from aotc.vmfb.bundle import MAGIC

    try:
        data = path.read_bytes()
        return data if data.startswith(MAGIC) else parse(data)
    except OSError as error:
        raise CompileError.at(Loc(str(path)), f"cannot read the {name}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise CompileError.at(Loc(str(path)), f"the file is not a {kind}: {error}", hint=hint) from None


def read_tuning_option(path: Path | None) -> dict[str, Any]:
    """Read the tuning record in a file or a tuned bundle; return an empty record without a path."""
    if path is None:
        return {}
    from aotc.diagnostics import CompileError, Loc
    from aotc.lowering.tuning import read_tuning_record
    from aotc.recompile import model_of

    hint = "the file that `aotc tune --record` wrote, or a tuned bundle"
    found = _read_record_or_bundle(path, read_tuning_record, "tuning record", "tuning record", hint)
    if isinstance(found, bytes):
        found = dict(model_of(found)[2].tuning)
    if not found:
        raise CompileError.at(Loc(str(path)), "the bundle was not tuned", hint="aotc tune it")
    return found


def read_cost_record(path: Path | None) -> dict[str, Any]:
    """Read the cost record in a file or a bundle; return an empty record without a path."""
    if path is None:
        return {}
    from aotc.diagnostics import CompileError, Loc
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.profile.cost_record import read_record
    from aotc.vmfb.profile.stored_records import COSTS, PROFILE, stored_record

    hint = "the file that `aotc profile -o record.json` wrote, or a bundle with stored times"
    found = _read_record_or_bundle(path, read_record, "costs", "cost record", hint)
    if isinstance(found, bytes):
        opened = open_bundle(found)
        found = stored_record(opened, PROFILE) or stored_record(opened, COSTS)
    if not found:
        raise CompileError.at(Loc(str(path)), "the bundle has no measured times", hint="aotc profile it")
    return found
