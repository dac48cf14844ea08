"""START HERE: the compiler in one file.

:data:`PASSES` is the table of everything that happens to a model between import
and kernels; :func:`run_passes` is the loop that runs it, and the only place that
times, verifies, prints, dumps, stops and bisects. :func:`compile` is the way
from a model to the bytes of a bundle::

    model --import_model--> tensor IR --PASSES--> fused tensor IR
          --lower_region--> loop IR --bufferize, plan_memory, schedule--> program
          --build_library--> native kernels --write_bundle--> one file
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotc import bundle_cache
from aotc.assemble import Variant, assemble
from aotc.diagnostics import UNKNOWN, CompileError, Finding, InternalError
from aotc.frontend.dims import static, symbols
from aotc.frontend.tensor_ir import Function, Module
from aotc.lowering.bufferize import bufferize
from aotc.lowering.canonicalize import canonicalize
from aotc.lowering.contraction import canonicalize_dot
from aotc.lowering.convolution import decompose_convolution
from aotc.lowering.cse import cse, structure
from aotc.lowering.dce import dce
from aotc.lowering.decompose_fft import decompose_fft
from aotc.lowering.emit_program import Stage, emit_program
from aotc.lowering.fold_constants import fold_constants
from aotc.lowering.fuse import fuse
from aotc.lowering.inline import inline
from aotc.lowering.loop_invariant import loop_invariant
from aotc.lowering.loop_ir import Kernel
from aotc.lowering.lower import lower_region
from aotc.lowering.plan_memory import plan_stages
from aotc.lowering.rules.custom_call import CustomCall, custom_call_of
from aotc.lowering.schedule import Scheduler
from aotc.lowering.single_process import single_process
from aotc.lowering.specialize import join_programs, specialize
from aotc.lowering.split_reductions import split_reductions
from aotc.lowering.split_windows import split_windows
from aotc.lowering.steps import Bind, Buffered, Check, Constants
from aotc.lowering.substitute_dims import free_loop_names
from aotc.lowering.tile_contractions import tile_contractions
from aotc.options import Options
from aotc.recursion import room_for
from aotc.targets import Target, resolve
from aotc.vmfb.custom_calls import registered


@dataclass(frozen=True, slots=True)
class Pass:
    """One step of the compiler: a pure function ``Module, Options -> Module``.

    ``required`` passes are never left out by ``--bisect``; ``establishes`` is the
    property of the module that holds from here on.
    """

    run: Callable[[Module, Options], Module]
    required: bool = False
    establishes: str = ""

    @property
    def name(self) -> str:
        """Return the pass's name as ``--print-after`` takes it."""
        return self.run.__name__.replace("_", "-")


PASSES: tuple[Pass, ...] = (
    Pass(inline, required=True, establishes="no calls"),
    Pass(specialize, required=True, establishes="an entry per combination of given sizes"),
    Pass(single_process, required=True, establishes="no collectives"),
    Pass(canonicalize),
    Pass(cse),
    Pass(loop_invariant),
    Pass(canonicalize_dot, required=True, establishes="products are matmul"),
    Pass(decompose_convolution, required=True, establishes="convolutions are conv"),
    Pass(decompose_fft, required=True, establishes="transforms are dft"),
    Pass(fold_constants),
    Pass(tile_contractions),
    Pass(fold_constants),
    Pass(split_windows),
    Pass(split_reductions),
    Pass(canonicalize),
    Pass(cse),
    Pass(dce),
    Pass(fuse, required=True, establishes="every op in a region"),
)


def run_passes(
    module: Module, options: Options, watch: Callable[[int, Pass, Module], None] | None = None
) -> Module:
    """Run :data:`PASSES` on ``module`` and return the result; ``watch`` sees what each pass makes."""
    for number, step in enumerate(PASSES, start=1):
        if options.progress:
            options.progress(number, len(PASSES), step.name)
        if 0 <= options.bisect < number and not step.required:
            continue
        begin = time.perf_counter()
        try:
            after = step.run(module, options)
            if options.verify_each:
                _verify(after, step)
        except (CompileError, InternalError):
            raise
        except Exception as error:
            raise _internal(error, f"in pass {number} {step.name}", module, options) from error
        module = after
        if watch:
            watch(number, step, module)
        _report(number, step, module, time.perf_counter() - begin, options)
        if step.name == options.stop_after:
            break
    return module


def _report(number: int, step: Pass, module: Module, seconds: float, options: Options) -> None:
    if options.timings:
        print(f"{number:3} {step.name:<24} {1e3 * seconds:8.1f} ms", file=sys.stderr)
    if options.print_after == step.name or options.dump_ir:
        from aotc.frontend.tensor_text import print_module

        text = print_module(module)
        if options.print_after == step.name:
            print(text, file=sys.stderr)
        if options.dump_ir:
            _dump(options, f"{number:02}-{step.name}.txt", text)


def _dump(options: Options, name: str, text: str) -> None:
    folder = Path(options.dump_ir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def _verify(module: Module, step: Pass) -> None:
    from aotc.frontend.tensor_verify import verify

    findings = verify(module)
    if findings:
        raise InternalError(f"after pass {step.name}: " + "; ".join(f.message for f in findings[:3]))


def _internal(error: Exception, where: str, module: Module, options: Options) -> InternalError:
    from tempfile import mkdtemp

    from aotc.frontend.tensor_text import print_module

    folder = Path(options.dump_ir or mkdtemp(prefix="aotc-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "before.txt").write_text(print_module(module))
    except Exception:
        (folder / "before.txt").write_text("the IR could not be printed")
    (folder / "traceback.txt").write_text(traceback.format_exc())
    return InternalError(
        f"{where}: {type(error).__name__}: {error}", str(folder), "aotc compile with --verify-each --dump-ir DIR"
    )


FRAMES_OF_A_REGION = 20_000  # fusion bounds how many ops depend on each other in one


def lower(module: Module, target: Target, options: Options) -> Variant:
    """Turn a fused module into kernels, command buffers and programs for one target.

    Raises
    ------
    CompileError
        If ``target`` has no lowering for some ops; all of them are named.
    """
    module = free_loop_names(module)
    kernels: dict[str, Kernel] = {}
    locs: dict[str, str] = {}
    custom: dict[str, CustomCall] = {}
    refused: list[Finding] = []
    lowered: dict[tuple, Kernel] = {}  # layers of a model are often the same
    for function in module.functions.values():
        if not function.public:
            try:
                key = structure(function)
                if key not in lowered:
                    lowered[key] = _lower_region(function, target, module, options)
                kernels[function.name] = replace(lowered[key], name=function.name)
                call = custom_call_of(function)
                if call is not None:
                    custom[_known(call).symbol] = call
            except CompileError as error:
                refused += error.findings
            locs[function.name] = function.loc.traced_by or str(function.loc)
    if refused:
        raise CompileError(refused)
    constants = Constants()
    public = {n: f for n, f in module.functions.items() if f.public}
    buffered = {n: bufferize(f, module, kernels, constants, target.loop_flops) for n, f in public.items()}
    names, unique = _deduplicate({k: v for b in buffered.values() for k, v in b.kernels.items()})
    variant = Variant(target, unique, [], {}, constants, 0, locs, custom)
    numbers = {k.name: n for n, k in enumerate(unique)}
    for name, b in buffered.items():
        function = public[name]
        slots = len(function.body.params), len(function.body.results)
        stages = _stages(b, variant, _slot_of(*slots), lambda k: numbers[names[k]])
        checks = [s for s in b.steps if isinstance(s, Check)]
        variant.programs[name] = emit_program(function, stages, checks)
        known = variant.arena is not None and isinstance(stages[-1].arena, int)
        variant.arena = max(variant.arena or 0, static(stages[-1].arena)) if known else None
    _join_specialized(variant, public)
    return variant


def _stages(
    b: Buffered, variant: Variant, slot_of: Callable[[Any], int], kernel_number: Callable[[str], int]
) -> list[Stage]:
    """Plan memory and encode a command buffer for each stretch of steps between sizes that are read from memory."""
    binds = [s for s in b.steps if isinstance(s, Bind)]
    known = {str(bind.dim): n for n, bind in enumerate(binds, start=1)}
    totals = plan_stages(b.arena, lambda e: max((known.get(s.name, 0) for s in symbols(e)), default=0), len(binds) + 1)
    stages: list[Stage] = []
    rest = list(b.steps)
    for total, bind in zip(totals, [*binds, None], strict=True):
        end = rest.index(bind) if bind is not None else len(rest)
        buffer = Scheduler(slot_of, kernel_number).encode(rest[:end])
        stages.append(Stage(buffer, len(variant.command_buffers), total, bind))
        variant.command_buffers.append(buffer)
        rest = rest[end + 1 :]
    return stages


def _lower_region(function: Function, target: Target, module: Module, options: Options) -> Kernel:
    try:
        with room_for(FRAMES_OF_A_REGION):
            return lower_region(function, target)
    except (CompileError, InternalError):
        raise
    except Exception as error:
        raise _internal(error, f"while lowering region {function.name}", module, options) from error


def _join_specialized(variant: Variant, public: Mapping[str, Function]) -> None:
    """Give the program of each general function the code of its copies for given sizes."""
    for name, general in public.items():
        copies = [f for f in public.values() if f.attrs.get("specializes") == name]
        if copies:
            programs = [(f, variant.programs.pop(f.name)) for f in copies]
            variant.programs[name] = join_programs((general, variant.programs[name]), programs)
            variant.specialized[name] = [dict(f.attrs["dims"]) for f in copies]


def _known(call: CustomCall) -> CustomCall:
    """Return ``call``, or say how to register it."""
    if registered(call.name) is None:
        raise CompileError.at(
            call.loc,
            f"custom call @{call.name} is not known",
            hint=f"before compiling say what it does: aotc.register_custom_call({call.name!r}, function)",
        )
    return call


def _slot_of(arguments: int, results: int) -> Callable[[Any], int]:
    base = {"argument": 0, "result": arguments}
    fixed = {"arena": arguments + results, "constant": arguments + results + 1}
    return lambda s: base[s.kind] + s.number if s.kind in base else fixed[s.kind]


def _deduplicate(kernels: Mapping[str, Kernel]) -> tuple[dict[str, str], list[Kernel]]:
    """Return the name of the kernel that stands for each, and the distinct kernels."""
    chosen: dict[Kernel, str] = {}
    names: dict[str, str] = {}
    for name, kernel in kernels.items():
        names[name] = chosen.setdefault(replace(kernel, name=""), name)
    return names, [kernels[n] for n in dict.fromkeys(names.values())]


def compile(model: Any, *example_args: Any, options: Options | None = None, **flags: Any) -> bytes:
    """Compile a model and return the bytes of a bundle.

    Parameters
    ----------
    model : str, bytes, path, jax.export.Exported or callable
        StableHLO text or bytecode, a portable artifact, a serialized export, the
        path of one, or a (jitted) function together with ``example_args``.
    *example_args
        Arrays or ``jax.ShapeDtypeStruct`` (symbolic shapes too), for a function.
    options : Options, optional
        All options at once; or give its fields as keywords, e.g. ``target="cpu"``.

    Returns
    -------
    bytes
        The bundle; :func:`aotc.load` takes it.

    Raises
    ------
    CompileError
        The model cannot be compiled: where, what was found, what was expected.
    """
    chosen = replace(options or Options(), **flags)
    check_options(chosen)
    targets = resolve(chosen.target)
    from aotc.frontend.mlir import fetch

    if callable(model):  # tracing takes longer than the compilers need to start
        _start_compilers(targets, chosen)
    raw = fetch(model, *example_args)
    key = bundle_cache.key_of(raw, chosen, targets) if bundle_cache.applies(chosen) else ""
    found = bundle_cache.read(key) if key else None
    if found is not None:
        return found
    begin = time.perf_counter()
    _start_compilers(targets, chosen)
    given = [raw]
    del raw
    with _without_collection():
        data = _compile(given, targets, chosen)
    if key and time.perf_counter() - begin > bundle_cache.WORTH_SECONDS:
        bundle_cache.write(key, data)
    return data


def check_options(options: Options) -> None:
    """Refuse options that name nothing.

    Raises
    ------
    CompileError
        If ``stop_after`` or ``print_after`` is no pass, ``weights`` no safetensors file, ``dump_ir`` no folder,
        ``opt_level`` no level, ``jobs`` negative.
    """
    if options.jobs < 0:
        raise CompileError.at(UNKNOWN, f"jobs is {options.jobs}", hint="a number of processes; 0 is one per core")
    if options.opt_level not in range(4):
        raise CompileError.at(UNKNOWN, f"opt_level is {options.opt_level!r}", hint="0, 1, 2 or 3")
    names = list(dict.fromkeys(step.name for step in PASSES))
    for name in filter(None, (options.stop_after, options.print_after)):
        if name not in names:
            raise CompileError.at(UNKNOWN, f"no pass {name!r}", hint=f"one of {', '.join(names)}")
    if options.weights != "inline" and not options.weights.endswith(".safetensors"):
        raise CompileError.at(UNKNOWN, f"weights is {options.weights!r}", hint="inline, or a path.safetensors")
    folder = Path(options.dump_ir)
    if options.dump_ir and any(p.exists() and not p.is_dir() for p in (folder, *folder.parents)):
        raise CompileError.at(UNKNOWN, f"dump_ir is {options.dump_ir!r}, which is no folder", hint="a new folder")


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python from looking for garbage in cycles: each search goes through the whole program, and finds nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compile(given: list[Any], targets: tuple[Target, ...], options: Options) -> bytes:
    """Compile the model that is the only element of ``given``.

    A model may be as large as its weights: it is taken out of the list, and what
    each step was made from is let go before the next one.
    """
    from aotc.frontend.importer import import_raw

    modules = [import_raw(given.pop())]
    functions = {n: replace(f, body=replace(f.body, ops=())) for n, f in modules[0].functions.items() if f.public}
    signatures = replace(modules[0], functions=functions)
    variants = []
    for target in targets:
        one = replace(options, target=target.name)
        last = target is targets[-1]
        variants.append(lower(run_passes(modules.pop() if last else modules[0], one), target, one))
    return assemble(signatures, variants, options)


def _start_compilers(targets: tuple[Target, ...], options: Options) -> None:
    """Begin starting the compiler processes while the model is being read."""
    from aotc.kernels.cpu.build import start_workers

    start_workers(options)


__all__ = ["PASSES", "Pass", "compile", "lower", "run_passes"]
