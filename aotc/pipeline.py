"""START HERE: the compiler on one page.

:data:`PASSES` lists every transformation between import and kernels, in order. :func:`run_passes` is the loop that runs
it, and the only place that verifies, prints, dumps, stops and bisects. :func:`compile` turns a model into the bytes of
a bundle; each of its stages runs under :func:`aotc.guard.guard`::

    model --fetch, import_raw (frontend)--> tensor IR
          --PASSES (lowering/passes)--> fused tensor IR
          --lower (lowering): regions, program--> loop IR, command buffers, host programs
          --assemble: kernels, begun while lower plans the program; vmfb--> native code --> one file
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aotc.bundle import Bundle
from aotc.diagnostics import UNKNOWN, CompileError, InternalError, warn_user
from aotc.driver import bundle_cache
from aotc.driver.assemble import KernelsCompiledAhead, assemble
from aotc.driver.declare_state import declare_bindings
from aotc.driver.function_signatures import warn_of_hidden_functions
from aotc.driver.output_path import check_output_path
from aotc.driver.weights import compile_with_weights, unreachable_weights_note
from aotc.guard import guard, reraise_user_errors
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Module
from aotc.ir.tensor.text import print_module
from aotc.kernels.cpu.build import start_workers
from aotc.kernels.cpu.find_linker import linker_of_target
from aotc.kernels.jobs.pool import POOL
from aotc.kernels.numba_front.replace import module_texts
from aotc.lowering import invariants
from aotc.lowering.cost_model.model import check_cost_record_program, digest_of_program
from aotc.lowering.cost_model.work import typical_sizes
from aotc.lowering.lower import Variant, check_same_devices_in_variants, ignore_variant, lower
from aotc.lowering.passes.advance_checks import advance_checks
from aotc.lowering.passes.assign_devices import assign_devices
from aotc.lowering.passes.bind_weights import bind_weights
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.canonicalize_dot import canonicalize_dot
from aotc.lowering.passes.combine_collectives import combine_collectives
from aotc.lowering.passes.compute_constants import compute_constants
from aotc.lowering.passes.cse import cse
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.decompose_convolution import decompose_convolution
from aotc.lowering.passes.decompose_fft import decompose_fft
from aotc.lowering.passes.fold_constants import fold_constants
from aotc.lowering.passes.fold_reduce_scatter import fold_reduce_scatter
from aotc.lowering.passes.fuse.fuse import fuse
from aotc.lowering.passes.fuse_attention import fuse_attention
from aotc.lowering.passes.gather_panels import gather_panels
from aotc.lowering.passes.hoist_checks import hoist_checks
from aotc.lowering.passes.hoist_products import hoist_products
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.isolate_devices import isolate_devices
from aotc.lowering.passes.join_devices import join_devices
from aotc.lowering.passes.licm import licm
from aotc.lowering.passes.lower_collectives import lower_collectives
from aotc.lowering.passes.mark_concurrent import mark_concurrent
from aotc.lowering.passes.narrow_products import narrow_products
from aotc.lowering.passes.pack_contractions.pack_contractions import pack_contractions
from aotc.lowering.passes.parallelize_gpu.parallelize_gpu import parallelize_gpu
from aotc.lowering.passes.quantize_weights import quantize_weights
from aotc.lowering.passes.rank_calls import check_rank_targets
from aotc.lowering.passes.set_precision import set_precision
from aotc.lowering.passes.sink_transposes import sink_transposes
from aotc.lowering.passes.softmax_by_reciprocal import softmax_by_reciprocal
from aotc.lowering.passes.specialize import specialize
from aotc.lowering.passes.split_attention import split_attention
from aotc.lowering.passes.split_reductions import split_reductions
from aotc.lowering.passes.split_rows import split_rows
from aotc.lowering.passes.split_weights import split_weights
from aotc.lowering.passes.split_windows import split_windows
from aotc.lowering.passes.unroll_loops import unroll_loops
from aotc.lowering.passes.update_in_place import update_in_place
from aotc.lowering.passes.vectorize_argmax import vectorize_argmax
from aotc.lowering.placement.host_only import imply_host
from aotc.lowering.tuning import record_problem as tuning_problem
from aotc.lowering.tuning import tuned_by
from aotc.options import Options, check_options, with_byte_limits, with_current_passes, with_listed_sizes
from aotc.progress import FIRST, begin_stage, timed_stages
from aotc.source import reader_process
from aotc.source.embed import embed_source
from aotc.source.moves import UnpackingRules
from aotc.source.record import EmbeddedSource, recorded_options
from aotc.source.reproducer import reproducible
from aotc.support.gc_pause import without_collection
from aotc.targets import Target, host_target_of_gpu, resolve_targets, variant_targets
from aotc.vmfb.errors import misspelling_hint
from aotc.vmfb.log import INFO, log
from aotc.vmfb.profile.cost_record import record_problem
from aotc.vmfb.verify.check_bundle import check_bundle

if TYPE_CHECKING:
    from typing import Unpack

    from aotc.frontend.mlir import RawModel
    from aotc.options import OptionKeywords

Run = Callable[[Module, Options], Module]


@dataclass(frozen=True, slots=True)
class Pass:
    """One compiler pass, ``Module, Options -> Module``.

    ``--bisect`` never skips a pass that is ``required``. ``establishes`` returns the violations of the invariant that
    holds after the pass; ``--verify-each`` checks it after this pass and each later one.
    """

    run: Run
    required: bool = False
    establishes: invariants.Predicate | None = None

    @property
    def name(self) -> str:
        """Return the pass's name as in ``--print-after``."""
        return self.run.__name__.replace("_", "-")


PASSES: tuple[Pass, ...] = (
    Pass(inline, required=True, establishes=invariants.no_ops_left_of_pass(inline)),
    Pass(hoist_checks, required=True, establishes=invariants.assertions_are_outside_loops),
    Pass(specialize, required=True, establishes=invariants.specialized_copies_are_complete),
    Pass(fold_reduce_scatter),
    Pass(combine_collectives),
    Pass(lower_collectives, required=True, establishes=invariants.no_ops_left_of_pass(lower_collectives)),
    Pass(canonicalize),
    Pass(cse),
    Pass(licm),
    Pass(update_in_place),
    Pass(compute_constants),
    Pass(assign_devices, required=True, establishes=invariants.operands_are_on_their_devices),
    Pass(isolate_devices, required=True, establishes=invariants.transfers_are_outside_regions),
    Pass(fuse_attention),
    Pass(split_attention),
    Pass(narrow_products),
    Pass(canonicalize_dot, required=True, establishes=invariants.no_ops_left_of_pass(canonicalize_dot)),
    Pass(decompose_convolution, required=True, establishes=invariants.no_ops_left_of_pass(decompose_convolution)),
    Pass(decompose_fft, required=True, establishes=invariants.no_ops_left_of_pass(decompose_fft)),
    Pass(set_precision),
    Pass(unroll_loops),
    Pass(hoist_products),
    Pass(bind_weights),
    Pass(fold_constants),
    Pass(quantize_weights),
    Pass(pack_contractions),
    Pass(fold_constants),
    Pass(gather_panels),
    Pass(parallelize_gpu, required=True, establishes=invariants.merged_runs_are_sorted),
    Pass(licm),
    Pass(vectorize_argmax),
    Pass(sink_transposes),
    Pass(split_windows),
    Pass(split_rows),
    Pass(softmax_by_reciprocal),
    Pass(split_reductions),
    Pass(canonicalize),
    Pass(cse),
    Pass(split_weights, required=True, establishes=invariants.weights_are_in_prepare_functions),
    Pass(dce),
    Pass(advance_checks, required=True, establishes=invariants.assertions_come_first),
    Pass(fuse, required=True, establishes=invariants.kernel_ops_are_in_regions),
    Pass(mark_concurrent),
    Pass(join_devices, required=True, establishes=invariants.no_ops_left_of_pass(join_devices)),
)

_NO_LOWERING = "lowering has no rule for what the first replaces"

MUST_PRECEDE: tuple[tuple[Run, Run, str], ...] = (
    (inline, licm, "what is behind a call cannot leave the loop"),
    (inline, hoist_checks, "what is behind a call cannot leave the loop or branch around it"),
    (hoist_checks, fuse, "what a loop is to carry of an assertion would be in no region"),
    (inline, fuse, "a region is cut out of one body, and what is called would become no region"),
    (specialize, split_reductions, "a sum is split by its size, which only the copy for that size knows"),
    (specialize, fuse, "a copy's host program sizes buffers by its own dims: it needs regions of its own"),
    (lower_collectives, fuse, _NO_LOWERING),
    (fold_reduce_scatter, lower_collectives, "what sums over ranks is a call by then"),
    (fold_reduce_scatter, combine_collectives, "a sum that is one of several in a call is not sliced by rank alone"),
    (combine_collectives, lower_collectives, "calls have numbers in one order by then"),
    (licm, isolate_devices, "what does not change in a loop would be moved to another device in each iteration"),
    (assign_devices, isolate_devices, "regions are of the devices that it assigns"),
    (isolate_devices, canonicalize_dot, "what that makes of an op is on its device because it stands in its region"),
    (isolate_devices, fuse, "a kernel would hold ops of several devices"),
    (fuse, mark_concurrent, "only of kernels it is known what others they do not need"),
    (mark_concurrent, join_devices, "the region that an op stands in tells its device"),
    (fuse, join_devices, "only a dispatch says where it runs"),
    (licm, fuse, "what does not change in a loop would be part of a kernel that runs in each iteration"),
    (narrow_products, canonicalize_dot, "an operand is widened right before its product, not behind a transpose"),
    (narrow_products, decompose_convolution, "an operand is widened right before its product, not behind its padding"),
    (canonicalize_dot, pack_contractions, "only matmul is packed"),
    (fuse_attention, canonicalize_dot, "attention is made of dot_general, whose dims say what the axes are"),
    (canonicalize_dot, fuse, _NO_LOWERING),
    (decompose_convolution, pack_contractions, "only conv is packed, and the matmul that a convolution may be"),
    (decompose_convolution, fuse, _NO_LOWERING),
    (decompose_fft, fuse, _NO_LOWERING),
    (canonicalize_dot, set_precision, "what is no product, but a selection or a multiplication, would be rounded"),
    (set_precision, pack_contractions, "weights are packed for the tiles of their type, as what they are rounded to"),
    (fold_constants, pack_contractions, "weights are packed if they are constants by then"),
    (fold_constants, quantize_weights, "only what is a constant by then is quantised"),
    (quantize_weights, pack_contractions, "what is packed for tiles of floats is no matmul any more"),
    (pack_contractions, fold_constants, "weights are packed at compile time because the ops that do it fold"),
    (specialize, bind_weights, "copies for given sizes take what is prepared too"),
    (bind_weights, pack_contractions, "weights are packed before a call if they are known to be weights by then"),
    (pack_contractions, split_weights, "what packs them is what leaves the function"),
    (split_weights, fuse, "a kernel would hold what is prepared and what is not"),
    (pack_contractions, licm, "what a loop does not change would be packed in each iteration"),
    (pack_contractions, sink_transposes, "tiles decide in which order a convolution is computed"),
    (sink_transposes, fuse, "windows and transposes are in kernels by then"),
    (split_windows, canonicalize, "the reshapes and slices around the steps are still to be merged"),
    (split_windows, fuse, "the steps are to become kernels"),
    (vectorize_argmax, split_reductions, "of a long row each of the two reductions is cut in parts"),
    (split_rows, split_reductions, "each of two reductions of a row would be cut by itself, and not be known any more"),
    (split_rows, fuse, "the parts are to become kernels"),
    (split_reductions, fuse, "the steps are to become kernels"),
    (parallelize_gpu, fuse, "the steps are to become kernels"),
    (hoist_checks, advance_checks, "a loop that fails is to be judged before what comes after it"),
    (advance_checks, fuse, "what is needed for a check would share kernels with what is not"),
    (cse, fuse, "equal ops in two regions are computed twice"),
    (dce, fuse, "what nobody reads would become a kernel"),
)
"""Ordering constraints: the first pass must run before the last run of the second, for the given reason."""


def run_passes(module: Module, options: Options, watch: Callable[[int, Pass, Module], None] | None = None) -> Module:
    """Run :data:`PASSES` on ``module`` and return the result; call ``watch`` with the module after each pass."""
    with typical_sizes(options.typical):
        return _run_passes(module, options, watch)


def _run_passes(module: Module, options: Options, watch: Callable[[int, Pass, Module], None] | None) -> Module:
    """Run all passes that the options do not skip, with verification, dumps and reports after each."""
    done: list[Pass] = []
    for number, step in enumerate(PASSES, start=1):
        begin_stage(options, step.name, number, len(PASSES))
        if 0 <= options.bisect < number and not step.required:
            continue
        with guard(f"in pass {number} {step.name}", options, module):
            after = step.run(module, options)
            done.append(step)
            if options.verify_each:
                _verify_after_passes(after, done)
        module = after
        if watch:
            watch(number, step, module)
        with guard(f"in the report on pass {number} {step.name}", options, module):
            _report_pass(number, step, module, options)
        if step.name == options.stop_after:
            break
    return module


def _report_pass(number: int, step: Pass, module: Module, options: Options) -> None:
    """Print and dump the IR after a pass if the options request it."""
    if options.print_after == step.name:
        print(print_module(module), file=sys.stderr)
    if options.dump_ir:
        _dump_ir(options, f"{number:02}-{step.name}.txt", print_module(module))


def _dump_ir(options: Options, name: str, text: str) -> None:
    Path(options.dump_ir).mkdir(parents=True, exist_ok=True)
    Path(options.dump_ir, name).write_text(text)


def _verify_after_passes(module: Module, done: Sequence[Pass]) -> None:
    """Verify the module after the passes ``done``, including the invariants that these passes establish."""
    findings = [f.message for f in verify(module)]
    findings += [f"{f.message} (as {s.name} establishes)" for s in done if s.establishes for f in s.establishes(module)]
    if findings:
        raise InternalError("the IR after it is wrong: " + "; ".join(findings[:3]))


_OWN_KEYWORDS = ("kwargs", "options", "args", "output", "mesh", "in_shardings", "out_shardings")  # of compile


def checked_options(
    options: Options | None, flags: Mapping[str, Any] = MappingProxyType({}), whole: bool = True
) -> Options:
    """Override ``options`` by ``flags``, and check and return them; with ``whole`` no pass may be skipped."""
    if unknown := sorted(set(flags) - set(known := [f.name for f in fields(Options)])):
        hint = misspelling_hint(unknown[0], [*known, *_OWN_KEYWORDS])
        raise CompileError.at(UNKNOWN, f"no option {unknown[0]!r}", hint=hint)
    if not isinstance(options, Options | None):
        raise CompileError.at(UNKNOWN, f"options is {options!r}", hint="aotc.options.Options, or fields as keywords")
    chosen = with_current_passes(with_listed_sizes(with_byte_limits(replace(options or Options(), **flags))))
    check_options(chosen, [step.name for step in PASSES])
    if chosen.replace:
        chosen = replace(chosen, replace=module_texts(chosen.replace))
    if chosen.host_target:  # "cpu" means a different target on each machine
        chosen = replace(chosen, host_target=host_target_of_gpu((), chosen.host_target).name)
    if chosen.costs and (said := record_problem(chosen.costs)):
        raise CompileError.at(UNKNOWN, f"the file is not a cost record: {said}", hint="what `aotc profile -o` wrote")
    if chosen.tuning and (said := tuning_problem(chosen.tuning)):
        raise CompileError.at(UNKNOWN, f"this is not a tuning record: {said}", hint="what `aotc tune --record` wrote")
    if whole and chosen.stop_after not in ("", PASSES[-1].name):
        hint = f"aotc compile --stop-after={chosen.stop_after} -o -, which prints the IR"
        message = f"stop_after is {chosen.stop_after!r}, but compile makes a bundle, which needs all passes"
        raise CompileError.at(UNKNOWN, message, hint=hint)
    return chosen


@reraise_user_errors()
def compile(
    model: Any, *example_args: Any, kwargs: Mapping[str, Any] | None = None, options: Options | None = None,
    args: Mapping[str, Sequence[Any]] | None = None, output: str | os.PathLike[str] | None = None,
    mesh: object = None, in_shardings: object = None, out_shardings: object = None, **flags: Unpack[OptionKeywords],
) -> Bundle:  # fmt: skip
    """Compile a model and return a bundle.

    Parameters
    ----------
    model : str, bytes, path, callable, jax.export.Exported, jax.stages.Traced or jax.stages.Lowered
        StableHLO text or bytecode, a portable artifact, a serialized export, the path of one, or a
        function with its example arguments: plain, jitted, partial, or ``equinox.filter_jit`` of one; or several
        of these by name, ``{"prefill": f, "decode": g}``, the functions of one bundle.
    *example_args
        Arrays, numbers or ``jax.ShapeDtypeStruct`` (symbolic shapes too); static arguments are compiled in.
    kwargs : mapping of str, optional
        Examples of keyword arguments; for several models, by name.
    options : Options, optional
        All options as one object; or pass its fields as keywords, for example ``target="cpu"``.
    args : mapping of str to sequence, optional
        The examples of several models, by name.
    output : path, optional
        File to write the bundle to as well: ``aotc.compile(f, x, output="f.vmfb")``.
    mesh : mapping of str to int, jax.sharding.Mesh or AbstractMesh, optional
        The mesh of a function that several ranks run, as ``{"data": 2, "model": 4}``; a function whose own shardings
        name a mesh needs none. For a program with shardings: names of its axes. See ``docs/sharding.md``.
    in_shardings, out_shardings : pytree of PartitionSpec, optional
        As in ``jax.jit``.

    Returns
    -------
    Bundle
        The bundle: ``aotc.compile(f, x).save("f.vmfb")`` writes it, :func:`aotc.load` loads it.

    Raises
    ------
    CompileError
        If the model cannot be compiled (the error says where, what was found and what was expected), if tracing the
        function raises (its exception is the cause), or if memory or disk space runs out.
    InternalError
        If aotc has a bug; the error names the stage and the folder with a reproducer.
    """
    reader_process.prepare_reader_for_model(model)
    chosen = checked_options(options, flags)
    if output is not None:
        if not isinstance(output, str | os.PathLike):
            raise CompileError.at(UNKNOWN, f"output is {output!r}"[:80], hint="the path of the bundle to write")
        check_output_path(Path(os.fsdecode(output)), option="output=")
    targets = variant_targets(resolve_targets(chosen.target), chosen.devices)
    if mesh is not None or in_shardings is not None or out_shardings is not None:
        model = model_on_mesh(chosen, model, mesh, in_shardings, out_shardings)
    made = compile_for(targets, chosen, model, example_args, args, kwargs)
    if output is not None:
        made.save(output)
        if note := unreachable_weights_note(made, chosen.weights, output):
            warn_user(note)
    return made


def compile_for(
    targets: tuple[Target, ...], chosen: Options, model: object, example_args: Sequence[Any] = (),
    args: Mapping[str, Sequence[Any]] | None = None, kwargs: Mapping[str, Any] | None = None,
) -> Bundle:  # fmt: skip
    """Compile a model for ``targets`` instead of the targets in the options; see :func:`compile`."""
    with timed_stages(chosen.timings):
        begin_stage(chosen, FIRST)
        with guard("while importing the compiler", chosen):
            from aotc.frontend.mlir import show_model_lines_in_errors
            from aotc.frontend.several_models import fetch_any
        begin_stage(chosen, "reading the model")
        given = model, example_args, args, kwargs, chosen.specialize
        with show_model_lines_in_errors(model), reproducible(chosen, targets, fetch_any, *given) as raws:
            return Bundle(compile_with_weights(raws, chosen, lambda raw, options: compile_raw(raw, targets, options)))


def model_on_mesh(
    options: Options, model: object, mesh: object, in_shardings: object = None, out_shardings: object = None
) -> object:
    """Attach a mesh and shardings to a model, or to several models by name."""
    with guard("while reading the shardings", options):
        from aotc.frontend.mlir import show_model_lines_in_errors
        from aotc.frontend.partition.meshes import function_on_mesh, read_on_mesh

        def one_on_mesh(one: object, ins: object, outs: object) -> object:
            return function_on_mesh(one, mesh, ins, outs) if callable(one) else read_on_mesh(one, mesh, ins, outs)

        with show_model_lines_in_errors(model):
            if not isinstance(model, Mapping):
                return one_on_mesh(model, in_shardings, out_shardings)
            ins, outs = (given if isinstance(given, Mapping) else {} for given in (in_shardings, out_shardings))
            return {name: one_on_mesh(one, ins.get(name), outs.get(name)) for name, one in model.items()}


# Seconds of compilation from which a bundle is cached on disk. A bundle that compiles faster is not worth a file.
WORTH_SECONDS = 0.5


def compile_raw(raw: RawModel, targets: tuple[Target, ...], chosen: Options) -> bytes:
    """Compile a fetched model for ``targets`` instead of the targets in the options; see :func:`compile`."""
    with guard("while looking for the bundle in the cache", chosen, raw.data, raw.path):
        key = bundle_cache.bundle_cache_key(raw, chosen, targets) if bundle_cache.is_cache_usable(chosen) else ""
        if key and (known := bundle_cache.read_cached_bundle(key)) is not None:
            log(INFO, "%s: the bundle is in the cache, %d bytes", raw.path or "a model", len(known))
            return known
    start = time.perf_counter()
    with guard("while starting the compiler processes", chosen):
        for target in targets:
            if (code := target.for_device("")).kind == "cpu":
                linker_of_target(code)  # a missing linker is an error before the first kernel is compiled
        start_workers(chosen)
    models, path = [raw], raw.path
    del raw
    with without_collection():
        data = _compile_model(models, targets, chosen)
    begin_stage(chosen, "checking the bundle")
    with guard("while checking the bundle that was written", chosen, path=path, passing=()):
        check_bundle(data)
    seconds, names = time.perf_counter() - start, ", ".join(target.name for target in targets)
    log(INFO, "%s: compiled for %s in %.2f s, %d bytes", path or "a model", names, seconds, len(data))
    if key and seconds > WORTH_SECONDS:
        bundle_cache.write_cached_bundle(key, data)
    return data


def _compile_model(models: list[Any], targets: tuple[Target, ...], options: Options) -> bytes:
    """Compile the only element of ``models`` and return the bundle's bytes.

    A model may be as large as its weights. So it is removed from the list, and each step's input is freed after the
    step.
    """
    from aotc.frontend.importer import import_raw
    from aotc.frontend.platforms import is_multi_platform

    raw = models.pop()
    begin_stage(options, "importing the model")
    several = is_multi_platform(raw.data, raw.metadata)  # one program per kind of target
    kinds = [target.for_device("").kind if several else "cpu" for target in targets]
    sources: list[EmbeddedSource] = []
    keep = partial(_record_source, raw, options, targets, sources) if options.source else None
    modules = {kind: import_raw(raw, options=options, platform=kind, parsed=keep) for kind in dict.fromkeys(kinds)}
    modules = {kind: declare_bindings(module, options) for kind, module in modules.items()}
    del raw, keep
    program = digest_of_program(modules[kinds[0]])
    with guard("while checking the costs", options):
        check_cost_record_program(options.costs, modules[kinds[0]])
    bare = {n: replace(f, body=replace(f.body, ops=())) for n, f in modules[kinds[0]].functions.items() if f.public}
    signatures = replace(modules[kinds[0]], functions=bare)
    check_rank_targets(signatures, targets)
    warn_of_hidden_functions(bare)
    variants: list[Variant] = []
    ways, used = [UnpackingRules() for _ in targets], list[UnpackingRules]()
    with KernelsCompiledAhead(signatures, options) as ahead:
        for n, (target, kind) in enumerate(zip(targets, kinds)):
            take = modules.__getitem__ if kind in kinds[n + 1 :] else modules.pop
            watch = _before_folding(ways[n].record_module)
            variant, one = lower_for_target(take(kind), target, targets, options, watch, ahead.begin)
            for row in variant.on_host:
                log(INFO, "%s runs on the host: no kernel for %s (%s)", row["op"], variant.target.name, row["loc"])
            if one.dump_ir:
                with guard("in the report on lowering", one):
                    _dump_ir(one, f"{len(PASSES) + 1:02}-lower.txt", variant.text)
            if variant.target.name not in {v.target.name for v in variants}:  # else all devices are named
                variants.append(variant)
                used.append(ways[n])
        check_same_devices_in_variants(variants, signatures)
        if not sources:
            return assemble(signatures, variants, options, ahead, program=program)
        found = POOL.run_in_background(partial(embed_source, sources.pop(), [v.constants for v in variants], used))
        return assemble(signatures, variants, options, ahead, found.result, program)


def lower_for_target(
    module: Module, target: Target, targets: tuple[Target, ...], options: Options,
    watch: Callable[[int, Pass, Module], None], known: Callable[[Variant], object] = ignore_variant,
) -> tuple[Variant, Options]:  # fmt: skip
    """Run all passes on an imported module and lower it for one of ``targets``; also return the options for it.

    The caller should have no reference to ``module``: each step frees its input, which may contain large weights.
    ``watch`` is that of :func:`run_passes`, ``known`` that of :func:`aotc.lowering.lower.lower`.
    """
    own = replace(options, target=target.for_device("").name)
    with tuned_by(options.tuning, own.target):
        module, target, own = imply_host(module, target, targets, own)
        module = run_passes(module, own, watch)
        begin_stage(own, "lowering")
        return lower(module, target, own, known), own


def _record_source(
    raw: RawModel, options: Options, targets: tuple[Target, ...], sources: list[EmbeddedSource], parsed: Any
) -> None:
    """Append the source of ``raw`` to the empty list ``sources``; ``parsed`` is its MLIR module."""
    from aotc.frontend.artifact import artifact_of

    if not sources:
        code, chosen = artifact_of(raw, parsed), recorded_options(options, targets)
        sources.append(EmbeddedSource(code, raw.path, raw.metadata, chosen, targets, len(targets)))


def _before_folding(see: Callable[[Module], None]) -> Callable[[int, Pass, Module], None]:
    """Return a ``watch`` for :func:`run_passes` that calls ``see`` once, with the module before constant folding."""

    def watch(number: int, _: Pass, module: Module) -> None:
        if number < len(PASSES) and PASSES[number].run is fold_constants:
            see(module)

    return watch
