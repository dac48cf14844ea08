"""Assemble a bundle: compile the kernels of each variant and write the file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

import aotc
from aotc.diagnostics import UNKNOWN, CompileError
from aotc.driver.compress_constants import compress_constants
from aotc.driver.function_signatures import binding_entries, program_entry, rename_size_symbols, signature_entry
from aotc.driver.weights import write_weights
from aotc.guard import guard
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import imported_functions
from aotc.ir.loop.ir import Kernel, calls_device_function, collective_symbol
from aotc.ir.loop.printer import print_kernel
from aotc.ir.tensor.ir import Module
from aotc.kernels.cpu.build import (
    LibraryBuild,
    NativeCall,
    SharedLibrary,
    build_executor,
    imported_symbols,
    replacement_error,
)
from aotc.kernels.cuda.nvvm import check_cuda_packages
from aotc.kernels.jobs.run import Refusal
from aotc.kernels.numba_front.replace import check_replaced_kernel_names
from aotc.lowering.cost_model.model import location_name
from aotc.lowering.lower import Variant
from aotc.lowering.program.memory_report import local_buffers_of_kernel, manifest_size
from aotc.options import Options
from aotc.progress import begin_stage
from aotc.source.embed import SourceSegments
from aotc.targets import MIX, Target
from aotc.vmfb.abi import COMMANDS_VERSION, EXECUTOR_VERSION
from aotc.vmfb.assumed_sizes import dim_names
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.custom_calls import registered_call
from aotc.vmfb.profile.cost_record import record_text
from aotc.vmfb.profile.stored_records import COSTS

_COMPILING = "while compiling the kernels"
_TRACED = re.compile(r"jit\(([A-Za-z]\w*)\)")  # of a name stack; neither a lambda nor a private wrapper


class KernelsCompiledAhead:
    """Early compilation of the CPU kernels of the first variant, in parallel to the rest of the pipeline.

    Use it as a context manager: at the end of the block it stops builds that no bundle needed. ``module`` provides the
    signatures.
    """

    def __init__(self, module: Module, options: Options) -> None:
        self._path, self._options, self._stack = _model_path(module), options, ExitStack()
        self._begun: tuple[Variant, LibraryBuild] | None = None

    def __enter__(self) -> KernelsCompiledAhead:
        return self

    def begin(self, v: Variant) -> None:
        """Start compiling the CPU kernels of variant ``v``.

        Do nothing if an earlier variant started: variants share ``jobs``.
        """
        part = next(
            (p for p in _targets_with_kernels(v) if p[0].kind == "cpu"), None
        )  # CPU kernels of one process are one part
        if part is not None and self._begun is None:
            with guard(_COMPILING, self._options, path=self._path):
                self._begun = v, self._entered(v, *part)
                self._begun[1].begin_ahead()

    def finish(self, v: Variant, target: Target, rows: slice, entry: Mapping[str, Any]) -> SharedLibrary:
        """Wait for the kernels ``rows`` of variant ``v`` compiled for ``target``, and return the library.

        ``entry`` is the manifest entry of the library.
        """
        match self._begun:
            case (one, build) if one is v:
                return build.finish(entry)
        return self._entered(v, target, rows).finish(entry)

    def _entered(self, v: Variant, target: Target, rows: slice) -> LibraryBuild:
        build = LibraryBuild(v.kernels[rows], target, self._options, native_calls(v), v.targets[rows])
        return self._stack.enter_context(build)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


def _model_path(module: Module) -> str:
    """Return the path of the model's file, or an empty string."""
    return next(f for f in module.functions.values() if f.public).loc.path


def _model_name(module: Module, variants: Sequence[Variant]) -> str:
    """Return the name of a model: of its file, of the traced function, or ``main``."""
    paths = {f.loc.path for f in module.functions.values() if f.public}
    if len(paths) == 1 and (path := paths.pop()):
        return PurePath(path).stem or module.name
    traced = {match[1] for v in variants for loc in v.locs.values() if (match := _TRACED.match(loc))}
    return traced.pop() if len(traced) == 1 else module.name


def _targets_with_kernels(v: Variant) -> list[tuple[Target, slice]]:
    """Return each target of variant ``v``, and the slice of ``v.kernels`` that is compiled for it."""
    parts = v.parts if v.target.kind == MIX else [(v.target, len(v.kernels))]
    ends = accumulate(count for _, count in parts)
    return [(target, slice(end - count, end)) for (target, count), end in zip(parts, ends, strict=True)]


def assemble(
    module: Module, variants: list[Variant], options: Options, ahead: KernelsCompiledAhead,
    source: Callable[[], SourceSegments] | None = None, program: str = "",
) -> bytes:  # fmt: skip
    """Compile the kernels of all variants and write the bundle.

    ``module`` gives the signatures; ``program`` is the digest of the imported program.
    """
    segments: list[tuple[str, Any]] = []
    path = _model_path(module)
    with guard(_COMPILING, options, path=path):
        if options.replace:
            parts = [part for v in variants for part in ((t, v.kernels[rows]) for t, rows in _targets_with_kernels(v))]
            check_replaced_kernel_names(options.replace, [(t.kind, k) for t, kernels in parts for k in kernels])
        entries = [_variant_entry(v, segments, options, ahead) for v in variants]
    with guard("while writing the bundle", options, path=path, passing=(CompileError,)):  # no file is written
        begin_stage(options, "keeping the model")
        embedded = _source_entry(source(), segments) if source else None
        begin_stage(options, "writing the bundle")
        debug = _debug_entry(variants, program) if options.debug_info else None
        about = {"about": dict(options.about)} if options.about else {}
        more = {**about, "debug": debug, "source": embedded, **_cost_record_entry(options, segments)}
        return _write_bundle_bytes(module, variants, entries, segments, options.typical, more)


def _cost_record_entry(options: Options, segments: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the manifest fields for the measured costs that the compilation used; empty without costs."""
    if not options.costs:
        return {}
    segments.append((COSTS, record_text(options.costs).encode()))
    return {COSTS: {"segment": len(segments) - 1}}


def _source_entry(source: SourceSegments, segments: list[tuple[str, Any]]) -> dict[str, Any]:
    """Add the model's source to ``segments`` and return the manifest fields for it."""
    number = len(segments)
    segments.append(("source", source.record))
    if source.weights:
        segments.append(("source/weights", source.weights))
    return {"segment": number, "bytes": source.size, "weights": number + 1 if source.weights else None}


def _write_bundle_bytes(
    module: Module, variants: list[Variant], entries: list[dict[str, Any]], segments: list[tuple[str, Any]],
    typical: Mapping[str, int], more: Mapping[str, Any],
) -> bytes:  # fmt: skip
    """Build the manifest from the ``entries`` of the variants, and return the bytes of the bundle."""
    main = next(f for f in module.functions.values() if f.public)
    devices = variants[0].devices
    dims = {s.name for v in main.body.params for d in v.type.shape for s in symbols(d)}
    functions = {
        f.name: signature_entry(f, devices.get(f.name), {n for v in variants for n in v.taken.get(f.name, ())})
        for f in module.functions.values()
        if f.public
    }
    for entry in functions.values() if typical else ():
        own = {name: int(typical[name]) for name in dim_names(entry["arguments"]) if name in typical}
        entry.update({"typical": own} if own else {})
    rename_size_symbols(entries, functions)
    manifest = {
        "format": 1,
        "producer": f"aotc {aotc.__version__}",
        "name": _model_name(module, variants),
        "functions": functions,
        "symbols": sorted(dims),
        **({"mesh": ranks["mesh"]} if (ranks := main.attrs.get("ranks")) else {}),
        "variants": entries,
        **more,
    }
    data = write_bundle(None, manifest, segments)
    assert data is not None
    return data


def _variant_entry(
    v: Variant, segments: list[tuple[str, Any]], options: Options, ahead: KernelsCompiledAhead
) -> dict[str, Any]:
    """Compile a variant's kernels, add its code to ``segments``, and return its manifest entry."""

    def add(name: str, data: Any) -> int:
        segments.append((f"{v.target.name}/{name}", data))
        return len(segments) - 1

    # Programs that prepare weights, or are called with prepared ones, have entries under ``prepared``.
    halves = {f.name for f in v.halves}
    entry: dict[str, Any] = {
        "target": v.target.name,
        "kind": "cuda" if v.implied else v.target.kind,
        "features": list(v.target.features),
        "commands_version": COMMANDS_VERSION,
        "command_buffers": [
            {
                "code": add(f"commands{n}", np.array(b.code, "<i8").tobytes()),
                "states": b.states,
                "parameters": len(b.parameters),
                **({"turns": b.iterations} if any(n is not None for n in b.iterations) else {}),
            }
            for n, b in enumerate(v.command_buffers)
        ],
        "functions": {n: program_entry(p) for n, p in v.programs.items() if n not in halves},
        **({"prepared": binding_entries(v)} if halves else {}),
        "specialized": v.specialized,
        **_device_entries(v),
        "arena_peak": v.arena,
        **({"memory_limit": options.memory_limit} if options.memory_limit else {}),
        "memory": {n: m.manifest_entry() for n, m in v.memory.items() if n in v.programs},
    }
    if v.target.kind == MIX:
        return {
            **entry,
            **_mixed_variant_entries(v, segments, options, ahead),
            "constants": _constants_entry(v, add, options),
        }
    _add_code(entry, v.target, slice(0, len(v.kernels)), v, add, options, ahead)
    entry["constants"] = _constants_entry(v, add, options)
    return entry


Add: TypeAlias = Callable[[str, Any], int]
"""Add a segment with a name and contents; return its number."""


def _add_code(
    entry: dict[str, Any],
    target: Target,
    rows: slice,
    v: Variant,
    add: Add,
    options: Options,
    ahead: KernelsCompiledAhead,
) -> None:
    """Compile the kernels ``rows`` for ``target`` and describe their code in ``entry``, part of the manifest."""
    kernels = v.kernels[rows]
    if target.kind == "cuda":
        check_cuda_packages(target.name)
        if collectives := [symbol for k in kernels if (symbol := collective_symbol(k))]:
            entry["custom_calls"] = [v.custom[symbol].manifest_entry() for symbol in dict.fromkeys(collectives)]
        built: Any = _gpu_images(v, kernels, target, options, entry)
        entry.update(built.entry(add("ptx" if target.portable else "cubin", built.data)))
    else:
        users = native_calls(v)
        entry["executor_version"] = EXECUTOR_VERSION
        needed = imported_symbols(kernels, users)
        entry["imports"] = {"lapack": lapack} if (lapack := [n for n in needed if n not in v.custom]) else {}
        entry["custom_calls"] = [v.custom[n].manifest_entry() for n in needed if n in v.custom]
        built = ahead.finish(v, target, rows, entry)
        entry["library"] = add("kernels.so", built.data)
        entry["executor"] = add("executor.so", build_executor(target, options))
    sizes_of_kernels = [{"sizes": v.sizes[k.name]} if k.name in v.sizes else {} for k in kernels]
    entry["kernels"] = [{**k.entry(), **sizes} for k, sizes in zip(built.kernels, sizes_of_kernels, strict=True)]


def _gpu_images(
    v: Variant, kernels: Sequence[Kernel], target: Target, options: Options, entry: Mapping[str, Any]
) -> Any:
    """Compile GPU kernels to images, including those that call users' functions or are replaced by them."""
    from aotc.kernels.cuda.build import build_kernel_images

    calls = {k.name: next(c for c in v.custom.values() if imported_functions(k)[0].endswith(c.symbol))
             for k in kernels if calls_device_function(k)}  # fmt: skip
    replaced = options.replaced("cuda")
    if not calls and not replaced:
        return build_kernel_images(kernels, target, options, entry)
    from aotc.driver.gpu_sources import gpu_kernel_sources, uncompiled_call_error  # imports Numba and its simulator

    try:
        sources = gpu_kernel_sources(kernels, calls, replaced, target, options)
        return build_kernel_images(kernels, target, options, entry, sources)
    except Refusal as refusal:
        if refusal.symbol not in calls:
            raise replacement_error(refusal.symbol, refusal.reason) from None
        raise uncompiled_call_error(calls[refusal.symbol], refusal.reason) from None


def _mixed_variant_entries(
    v: Variant, segments: list[tuple[str, Any]], options: Options, ahead: KernelsCompiledAhead
) -> dict[str, Any]:
    """Return the manifest entries of a mix: one per target, with its contiguous kernels, and one per memory space."""
    parts: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    for target, rows in _targets_with_kernels(v):

        def add(name: str, data: Any, target: Target = target) -> int:
            segments.append((f"{target.name}/{name}", data))
            return len(segments) - 1

        part: dict[str, Any] = {"target": target.name, "kind": target.kind, "features": list(target.features)}
        part["commands_version"] = COMMANDS_VERSION
        _add_code(part, target, rows, v, add, options, ahead)
        kernels += part.pop("kernels")
        parts.append({**part, "count": rows.stop - rows.start})
    targets = [target for target, _ in v.parts]
    spaces = [
        {
            "device": space.device,
            "part": targets.index(space.target),
            "arena": arena,
            "constants": constants.size,
            "pieces": [*map(list, constants.rows)],
        }
        for space, constants, arena in zip(v.spaces, v.pieces, v.arenas, strict=True)
    ]
    return {"kernels": kernels, "parts": parts, "spaces": spaces}


def _device_entries(v: Variant) -> dict[str, Any]:
    """Return the kind and target of each device in the model, and the transfers; empty without devices.

    A GPU and host that the model does not name are listed under ``implied``.
    """
    if not v.devices_of:
        return {}
    targets = {name: {"target": t.name, "features": list(t.features)} for name, t in v.devices_of.items()}
    kinds = {name: t.kind for name, t in v.devices_of.items()}
    own = {"implied": kinds, "on_host": v.on_host} if v.implied else {"devices": kinds}
    return {**own, "targets": targets, "transfers": v.transfers}


def native_calls(v: Variant) -> list[NativeCall]:
    """Return the user's native functions that CPU kernels of the variant call for custom calls."""
    rows = zip(v.kernels, v.targets, strict=True)
    called = {name for k, target in rows if target.kind == "cpu" for name in imported_functions(k)}
    return [
        NativeCall(c.name, c.symbol, c.operands + c.results, c.attributes, c.loc, user.function)
        for c in v.custom.values()
        if c.symbol in called and (user := registered_call(c.name)) is not None and user.native and user.function
    ]


def _constants_entry(v: Variant, add: Callable[[str, Any], int], options: Options) -> dict[str, Any] | None:
    """Store a variant's constants in the bundle, compressed if that pays, or in a file; return the manifest entry."""
    if not v.constants.arrays:
        return None
    if options.weights != "inline":
        return {"external": write_weights(options.weights, v.constants)}
    small = compress_constants(v.constants)
    if small is not None:
        return {"compressed": small.entry(add("constants", small.parts))}
    return {"segment": add("constants", v.constants.parts())}


def _debug_entry(variants: list[Variant], program: str) -> dict[str, Any]:
    """Return the debug information of the manifest: kernel text, source locations, memory ranges."""
    kernels = {}
    for v in variants:
        for k in v.kernels:
            kernels[f"{v.target.name}/{k.name}"] = {
                "text": print_kernel(k), "loc": v.locs.get(k.name, ""), "ops": v.op_counts.get(k.name, 0),
                **({"plan": k.plan} if k.plan else {}),
            }  # fmt: skip
    # One JSON string: the loader parses the rest of the manifest but never this part.
    buffers = json.dumps({v.target.name: _debug_buffer_ranges(v) for v in variants})
    places = json.dumps({v.target.name: _command_location_numbers(v) for v in variants})
    return {"kernels": kernels, "program": program, "buffers": buffers, "places": places}


def _command_location_numbers(v: Variant) -> dict[str, Any]:
    """Return the source locations of commands, as a number for each command of each command buffer.

    The number -1 means the location of the command's kernel. Layers of equal shape share a kernel, whose own location
    is in the first of them.
    """
    numbers: dict[str, int] = {}
    buffers = []
    for buffer in v.command_buffers:
        row = []
        for kernel, loc in (command or (-1, UNKNOWN) for command in buffer.locs):
            text = location_name(loc)
            own = kernel < 0 or v.locs.get(v.kernels[kernel].name) == text
            row.append(-1 if own else numbers.setdefault(text, len(numbers)))
        buffers.append(row if any(n >= 0 for n in row) else [])
    return {"locs": list(numbers), "buffers": buffers}


def _debug_buffer_ranges(v: Variant) -> dict[str, Any]:
    """Return the memory range of each function's buffers and the scratch arrays of each kernel, for debugging."""
    functions = {
        name: [
            [n, space, manifest_size(size), manifest_size(offset), first, last]
            for n, space, size, offset, first, last in m.buffers
        ]
        for name, m in v.memory.items()
    }
    alone = (target.kind == "cuda" for target, count in v.parts for _ in range(count))
    kernels = {k.name: local_buffers_of_kernel(k, a) for k, a in zip(v.kernels, alone, strict=True)}
    return {"functions": functions, "kernels": kernels}
