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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aotc import bundle_cache
from aotc.assemble import assemble
from aotc.diagnostics import UNKNOWN, CompileError, InternalError
from aotc.guard import internal_error
from aotc.ir.tensor_ir import Module
from aotc.lowering.lower import lower
from aotc.lowering.passes.canonicalize import canonicalize
from aotc.lowering.passes.canonicalize_dot import canonicalize_dot
from aotc.lowering.passes.cse import cse
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.decompose_convolution import decompose_convolution
from aotc.lowering.passes.decompose_fft import decompose_fft
from aotc.lowering.passes.fold_constants import fold_constants
from aotc.lowering.passes.fuse import fuse
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.licm import licm
from aotc.lowering.passes.lower_collectives import lower_collectives
from aotc.lowering.passes.pack_contractions import pack_contractions
from aotc.lowering.passes.specialize import specialize
from aotc.lowering.passes.split_reductions import split_reductions
from aotc.lowering.passes.split_windows import split_windows
from aotc.options import Options
from aotc.targets import Target, resolve


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
    Pass(lower_collectives, required=True, establishes="no collectives"),
    Pass(canonicalize),
    Pass(cse),
    Pass(licm),
    Pass(canonicalize_dot, required=True, establishes="products are matmul"),
    Pass(decompose_convolution, required=True, establishes="convolutions are conv"),
    Pass(decompose_fft, required=True, establishes="transforms are dft"),
    Pass(fold_constants),
    Pass(pack_contractions),
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
            raise internal_error(error, f"in pass {number} {step.name}", module, options) from error
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
        from aotc.ir.tensor_text import print_module

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
    from aotc.ir.tensor_verify import verify

    findings = verify(module)
    if findings:
        raise InternalError(f"after pass {step.name}: " + "; ".join(f.message for f in findings[:3]))




















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
        if one.dump_ir:
            _dump(one, f"{len(PASSES) + 1:02}-lower.txt", variants[-1].text)
    return assemble(signatures, variants, options)


def _start_compilers(targets: tuple[Target, ...], options: Options) -> None:
    """Begin starting the compiler processes while the model is being read."""
    from aotc.kernels.cpu.build import start_workers

    start_workers(options)


__all__ = ["PASSES", "Pass", "compile", "lower", "run_passes"]
