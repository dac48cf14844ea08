"""Compare a compiled model with its reference, and find the first faulty op and pass.

Three questions, each answered by running the model:

1. Do the bundle's results agree with the oracle's (the reference interpreter, or XLA)?
2. Which op is the first with a wrong result? The model is compiled again with the result of every op as a result of
   the function. In program order the reference applies each op to *our* operands, so each op is judged by its own
   error alone, in units in the last place. A loop or branch that differs is searched inside. If no op is wrong by
   itself, prefixes of the program are compiled: the shortest that differs ends at the op.
3. After which pass does the result change? The reference interpreter runs the IR after each pass.

With quantised weights, the first question compares with the reference of the program with rounded weights, and the
report includes the deviation of its results from the model's. The other questions use the model without quantisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice, product, zip_longest
from typing import Any
from warnings import catch_warnings, filterwarnings

import numpy as np

import aotc
from aotc.diagnostics import AotcWarning, CompileError, Loc
from aotc.display.document import Document, Line
from aotc.display.shown import DisplayedResult
from aotc.driver.assemble import KernelsCompiledAhead, assemble, signature_entry
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import RawModel
from aotc.frontend.xla import run_xla
from aotc.guard import THEIRS, guard, reraise_user_errors
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import FREE, OPS
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.opset.spec import static_sizes
from aotc.ir.semantics.run import Activation, Hooks, OperandError, bind_arguments, interpret
from aotc.ir.semantics.wide import wide_call, wide_results
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, captured_values, walk
from aotc.ir.tensor.substitute_dims import with_dims
from aotc.lowering.lower import lower
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.quantize_weights import QuantizationReport, quantize_and_report
from aotc.lowering.regions.custom_call import describe_custom_call
from aotc.options import Options
from aotc.pipeline import PASSES, Pass, run_passes
from aotc.targets import resolve_targets
from aotc.tools.agreement import Deviation, Mismatch, Tolerance, array_deviation, compare_op, compare_results
from aotc.tools.fetch_model import public_names
from aotc.tools.largest_error import LargestError, largest_error
from aotc.tools.sample_arguments import make_values
from aotc.vmfb.api.choose_function import choose_function
from aotc.vmfb.custom_calls import registered_call
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.errors import CallError

QUANTIZE = "quantize-weights"  # name of the pass


@dataclass(frozen=True, slots=True)
class Difference:
    """The first op with a differing result.

    ``within`` lists the loops and branches around it, outermost first. ``alone`` is True if the op is wrong for correct
    operands; otherwise only a program that ends with the op differs.
    """

    op: str
    type: str
    loc: Loc
    mismatch: Mismatch
    within: tuple[str, ...] = ()
    alone: bool = True
    kernels: tuple[str, ...] = ()


ORACLES = {"reference": "the reference", "jax": "XLA"}


@dataclass(frozen=True, slots=True, repr=False)
class CheckReport(DisplayedResult):
    """Result of a check; ``print`` displays it as ``aotc check`` does.

    Attributes
    ----------
    results : tuple of Mismatch or None
        The mismatch of each result.
    names : tuple of str
        Names of the results.
    difference : Difference or None
        The first op that differs.
    changed_by : str
        The pass that changes the result, if it was searched.
    reference : tuple of Mismatch or None
        Mismatches of the reference and XLA, with the oracle ``jax``.
    rounding : tuple of Deviation or None
        Deviation of results from the model's because of quantised weights; None for integers.
    errors : tuple of LargestError or None
        The largest absolute and relative error of each result; None where its shape differs.
    oracle : str
        ``reference`` or ``jax``.
    bisected : bool
        True if the pass was searched.
    arguments : str
        How random arguments were made; empty if all were given.
    ranks : str
        The ranks of a sharded model, whose ops are not compared by themselves.
    quantization : str
        The number of quantised matrices, and the reasons for which others are not; empty without the option.
    """

    results: tuple[Mismatch | None, ...]
    names: tuple[str, ...]
    difference: Difference | None = None
    changed_by: str = ""
    reference: tuple[Mismatch | None, ...] = field(default=())
    rounding: tuple[Deviation | None, ...] = ()
    errors: tuple[LargestError | None, ...] = ()
    oracle: str = "reference"
    bisected: bool = False
    arguments: str = ""
    ranks: str = ""
    quantization: str = ""

    @property
    def agrees(self) -> bool:
        """Return True if nothing differs."""
        return self.difference is None and not any(self.results)

    def document(self) -> Document:
        """Return the report of a check: the result differences, the first wrong op and pass."""
        lines = [Line(text) for text in (self.arguments, self.quantization) if text]
        lines += map(Line, self._result_lines())
        if self.ranks:
            lines.append(Line(f"{self.ranks} ran together, as threads; compared with the whole program on one device"))
        elif self.difference is not None:
            lines += [Line(""), *_difference_lines(self.difference)]
        elif self.agrees:
            lines.append(Line("each op agrees with the reference on the operands that it was given"))
        else:
            lines.append(Line("no op differs from the reference, alone or at the end of a part of the program"))
        if self.bisected and not self.agrees:
            lines.append(Line(_verdict_text(self.changed_by)))
        return Document("", tuple(lines))

    def _result_lines(self) -> Iterator[str]:
        """Yield a line for each result: agreement or mismatch, errors, and the effect of quantised weights."""
        what = ORACLES[self.oracle]
        for name, error in zip(self.names, self.rounding):
            if error is not None:
                share = f"{error.relative:.2g} of {what}'s root mean square"
                yield f"{name}: error of rounded weights: {share}, {error.largest:.3g} at most of {error.size:.3g}"
        what = "the reference on rounded weights" if self.rounding else what
        for name, mismatch, largest in zip_longest(self.names, self.results, self.errors):
            verdict = f"agrees with {what}" if mismatch is None else f"differs from {what}: {_mismatch_text(mismatch)}"
            yield f"{name}: {verdict}" + ("" if largest is None else f"; {largest}")
        for name, mismatch in zip(self.names, self.reference):
            if mismatch is not None:
                yield f"{name}: the reference itself differs from XLA: {_mismatch_text(mismatch)}"


def _difference_lines(d: Difference) -> list[Line]:
    """Return the lines about the first op that differs: location, mismatch, kernels."""
    lines = [Line(f"{d.loc}: {d.op} : {d.type} is the first op that differs")]
    if d.loc.traced_by:
        lines.append(Line(f"traced by: {d.loc.traced_by}", 2))
    lines += [Line(f"inside of: {place}", 2) for place in d.within]
    lines.append(Line(_mismatch_text(d.mismatch), 2))
    if not d.alone:
        text = "alone it is right: it differs only where it is compiled together with the ops before it"
        lines.append(Line(text, 2))
    if d.kernels:
        lines.append(Line(f"kernels it went into: {', '.join(d.kernels)}", 2))
    return lines


def _mismatch_text(m: Mismatch) -> str:
    """Describe a mismatch: element, both values, distance, number of differing elements."""
    if not m.index and m.units == float("inf") and m.largest == float("inf") and "[" in m.ours:
        return f"found {m.ours}, expected {m.expected}"
    worst = f"at {list(m.index)} {m.ours}, expected {m.expected} ({m.units:.3g} ulp, error {m.largest:.3g})"
    return f"{m.count:,} of {m.size:,} elements, the worst {worst}"


def _verdict_text(changed_by: str) -> str:
    if changed_by:
        return f"pass {changed_by} changes the result: the IR before it is right and the IR after it is not"
    return "no pass changes the result beyond rounding: the error is in the kernels of the final IR, or in their order"


_PASSING = (*THEIRS, OperandError, AssertionFailed)

# Iterations of a differing loop that are searched for the op that differs. The reference runs each one; this bounds the
# search to seconds.
MOST_ITERATIONS = 256


class Checker:
    """Compares a compiled model with its reference; see the module's questions.

    Parameters
    ----------
    raw : RawModel
        The model.
    options : Options
        Compiler options, for one CPU target.
    function : str
        The public function; by default the only one, or ``main``.
    tolerance : Tolerance, optional
        Replaces the bounds of ``aotc.tools.agreement``.
    """

    def __init__(self, raw: RawModel, options: Options, function: str = "", tolerance: Tolerance | None = None) -> None:
        self.raw, self.tolerance = raw, tolerance
        target = resolve_targets(options.target)[0].name  # for all devices: a named target may not run on this machine
        devices = dict.fromkeys(options.devices, target)
        self.whole = replace(options, target=target, devices=devices, specialize={})
        self.options = replace(self.whole, quantize_weights="none", typical={})  # for parts of the model
        self.module = import_raw(raw, options=self.options)
        self.name = choose_function(public_names(self.module), function, raw.path)
        with guard("while inlining", self.options, self.module, raw.path):
            self.function = inline(self.module, self.options).functions[self.name]

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Return the arguments of the function, as in a bundle's manifest."""
        rows: list[dict[str, Any]] = signature_entry(self.function)["arguments"]
        return rows

    @reraise_user_errors()
    def check(self, arrays: Sequence[np.ndarray], oracle: str = "reference", bisect: bool = False) -> CheckReport:
        """Compare the results of a call with ``arrays``; ``oracle`` is ``reference`` or ``jax``.

        Raises
        ------
        OperandError
            If ``arrays`` do not fit the function.
        AssertionFailed
            If an assertion of the model fails on them.
        """
        with guard("while comparing with the reference", self.options, self.module, self.raw.path, _PASSING):
            return self._report(arrays, oracle, bisect)

    def _report(self, arrays: Sequence[np.ndarray], oracle: str, bisect: bool) -> CheckReport:
        """Compile and call the model, compare it with the oracle, and search for the first wrong op and pass."""
        with catch_warnings():
            filterwarnings("ignore", "quantize_weights=", AotcWarning)  # the report contains it
            ours = self.run(self.module, self.name, arrays, self.whole)
        reference = interpret(self.module, *arrays, function=self.name, hooks=_HOOKS)
        want = reference
        of_reference: tuple[Mismatch | None, ...] = ()
        if oracle == "jax":
            want = run_xla(self.raw, arrays, self.name)
            of_reference = self._compare(reference, want, arrays)
        rounding: tuple[Deviation | None, ...] = ()
        judged, quantized = want, self._quantized_module()
        if quantized is None or not quantized[1].quantized:
            results = self._compare(ours, want, arrays)
        else:
            rounding = tuple(map(array_deviation, ours, want))
            judged = interpret(quantized[0], *arrays, function=self.name, hooks=_HOOKS)
            results = tuple(compare_results(a, b, self.tolerance) for a, b in zip(ours, judged, strict=True))
        difference = self._first_wrong_op(self.function, arrays)
        if difference is None and not rounding and any(self._compare(ours, reference, arrays)):
            difference = self._shortest_wrong_prefix(arrays)
        changed = self.changed_by(arrays) if bisect and (difference or any(results)) else ""
        errors = tuple(largest_error(a, b) if a.shape == b.shape else None for a, b in zip(ours, judged, strict=True))
        return CheckReport(
            results, self._result_names(), difference, changed, of_reference, rounding, errors, oracle, bisect,
            quantization="" if quantized is None else str(quantized[1]),
        )  # fmt: skip

    def compare_with_oracle(self, ours: Sequence[np.ndarray], arrays: Sequence[np.ndarray], oracle: str) -> CheckReport:
        """Compare ``ours``, results of other code for this program, with the reference or XLA, without a search."""
        with guard("while comparing with the reference", self.options, self.module, self.raw.path, _PASSING):
            reference = interpret(self.module, *arrays, function=self.name, hooks=_HOOKS)
            want = run_xla(self.raw, arrays, self.name) if oracle == "jax" else reference
            of_reference = self._compare(reference, want, arrays) if oracle == "jax" else ()
            errors = tuple(largest_error(a, b) if a.shape == b.shape else None for a, b in zip(ours, want, strict=True))
            results = self._compare(ours, want, arrays)
        return CheckReport(results, self._result_names(), reference=of_reference, errors=errors, oracle=oracle)

    def _result_names(self) -> tuple[str, ...]:
        count = len(self.function.body.results)
        return tuple(self.function.attrs.get("result_names") or [f"result{n}" for n in range(count)])

    def _quantized_module(self) -> tuple[Module, QuantizationReport] | None:
        """Return the program with quantised weights and the report on them; None without that option."""
        names = [step.name for step in PASSES]
        before = replace(self.whole, stop_after=names[names.index(QUANTIZE) - 1])
        if self.whole.quantize_weights == "none":
            return None
        module, report = quantize_and_report(run_passes(self.module, before), self.whole)
        return None if report is None else (module, report)

    def symbols(self) -> list[str]:
        """Return the names of the symbolic dims in the arguments."""
        dims = (d for p in self.function.body.params for d in p.type.shape)
        return sorted({s.name for d in dims for s in symbols(d)} - set(self.function.attrs.get("sizes", ())))

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """Return True if the function accepts the shapes and sizes of ``arrays``."""
        try:
            bind_arguments(self.function, arrays)
        except (OperandError, AssertionFailed):
            return False
        return True

    def require_fit(self, arrays: Sequence[np.ndarray]) -> None:
        """Raise CallError if the function does not accept ``arrays``."""
        try:
            bind_arguments(self.function, arrays)
        except (OperandError, AssertionFailed) as error:
            raise arguments_do_not_fit_error(error) from None

    def run(
        self, module: Module, name: str, arrays: Sequence[np.ndarray], options: Options | None = None
    ) -> list[np.ndarray]:
        """Compile ``module`` and return the results of its function ``name``."""
        chosen = options or self.options
        (target,) = resolve_targets(chosen.target)
        with KernelsCompiledAhead(module, chosen) as ahead:
            variant = lower(run_passes(module, chosen), target, chosen, ahead.begin)
            return aotc.load(assemble(module, [variant], chosen, ahead)).invoke(name, *arrays)

    def _compare(
        self, ours: Sequence[np.ndarray], want: Sequence[np.ndarray], arrays: Sequence[np.ndarray]
    ) -> tuple[Mismatch | None, ...]:
        """Compare results of the whole function for a call with ``arrays``."""
        exact = _LazyResults(lambda: wide_call(self.function, arrays, _HOOKS))
        pairs = enumerate(zip(ours, want, strict=True))
        return tuple(compare_results(a, b, self.tolerance, partial(exact.get, n)) for n, (a, b) in pairs)

    # --- the first op that differs ---

    def _first_wrong_op(self, function: Function, arrays: Sequence[np.ndarray]) -> Difference | None:
        """Return the first op of ``function`` that is wrong for correct operands, or None if there is none."""
        values = [v for op in _ops_to_compare(function.body) for v in op.results]
        probe = _function_with_results(function, values)
        found = self.run(Module({probe.name: probe}), probe.name, arrays)
        watch = _OpComparison(dict(zip(values, found, strict=True)), self.tolerance)
        hooks = replace(_HOOKS, after=watch.after)
        interpret(Module({function.name: function}), *arrays, function=function.name, hooks=hooks)
        if watch.op is None or watch.frame is None or watch.mismatch is None:
            return None
        inner = self._first_wrong_op_inside(watch.op, watch.frame)
        if inner is not None:
            return inner
        return self._difference(watch.op, watch.number, watch.mismatch)

    def _first_wrong_op_inside(self, op: Op, frame: Activation) -> Difference | None:
        """Return the first wrong op inside a loop or branch, run on the reference's values."""
        if op.name == "case":
            index = int(frame.environment[op.operands[0]])
            number = index if 0 <= index < len(op.regions) else len(op.regions) - 1
            return self._check_region(op.regions[number], [], frame, f"branch {number} of case", op.loc)
        if op.name != "while":
            return None
        carried = [frame.environment[v] for v in op.operands]
        fresh = Activation(frame.module, frame.dims, (), _HOOKS)
        fresh.environment = dict(frame.environment)
        condition, body = op.regions
        for iteration in range(MOST_ITERATIONS):
            for region, what in ((condition, "condition"), (body, "body")):
                found = self._check_region(region, carried, frame, f"{what} of while, iteration {iteration}", op.loc)
                if found is not None:
                    return found
            if not bool(fresh.run(condition, carried)[0]):
                break
            carried = fresh.run(body, carried)
        return None

    def _check_region(
        self, region: Region, arrays: Sequence[np.ndarray], frame: Activation, what: str, loc: Loc
    ) -> Difference | None:
        """Compile a region of a loop or branch for the reference's values, and search it for the first wrong op."""
        outer = captured_values(region)
        body = Region((*region.params, *outer), region.ops, region.results)
        function = with_dims(Function("region", body, True), frame.dims)
        found = self._first_wrong_op(function, [*arrays, *(frame.environment[v] for v in outer)])
        return None if found is None else replace(found, within=(f"{what} at {loc}", *found.within))

    def _difference(self, op: Op, number: int, mismatch: Mismatch) -> Difference:
        """Describe a difference, with the kernels that contain ops from the location of ``op``."""
        fused = run_passes(Module({self.name: self.function}), self.options)
        private = (f for f in fused.functions.values() if not f.public)
        kernels = tuple(f.name for f in private if any(inner.loc is op.loc for inner in f.body.ops))
        return Difference(op.name, str(op.results[number].type), op.loc, mismatch, (), True, kernels)

    def _shortest_wrong_prefix(self, arrays: Sequence[np.ndarray]) -> Difference | None:
        """Search by bisection for the shortest program prefix whose compiled values differ; return its last op."""
        ops = _ops_to_compare(self.function.body)
        recorded: dict[Value, np.ndarray] = {}

        def record(frame: Activation, op: Op, results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            recorded.update(zip(op.results, results))
            return results

        hooks = replace(_HOOKS, after=record)
        interpret(Module({self.name: self.function}), *arrays, function=self.name, hooks=hooks)
        low, high, worst = 0, len(ops), None
        while low < high:
            middle = (low + high) // 2
            found = self._compare_prefix(ops[: middle + 1], arrays, recorded)
            if found is None:
                low = middle + 1
            else:
                high, worst = middle, found
        return None if worst is None else replace(self._difference(*worst), alone=False)

    def _compare_prefix(
        self, ops: Sequence[Op], arrays: Sequence[np.ndarray], want: Mapping[Value, np.ndarray]
    ) -> tuple[Op, int, Mismatch] | None:
        """Compile the program up to the last of ``ops``, and compare the values that later ops read.

        ``want`` has the reference's values. Return the first differing op, the number of its result, and the mismatch.
        """
        made = {v: (op, n) for op in ops for n, v in enumerate(op.results)}
        body = self.function.body
        count = body.ops.index(ops[-1]) + 1
        values = _values_read_later(body, count, set(made)) or list(ops[-1].results)
        probe = _function_with_results(replace(self.function, body=Region(body.params, body.ops[:count], ())), values)
        found = self.run(Module({probe.name: probe}), probe.name, arrays)
        for v, ours in reversed(list(zip(values, found, strict=True))):
            mismatch = compare_results(ours, want[v], self.tolerance)
            if mismatch:
                return (*made[v], mismatch)
        return None

    # --- the pass ---

    def changed_by(self, arrays: Sequence[np.ndarray]) -> str:
        """Return the number and name of the first pass that changes the interpreted result, or an empty string."""
        want = interpret(self.module, *arrays, function=self.name, hooks=_HOOKS)
        made: list[tuple[int, Pass, Module]] = []
        run_passes(self.module, self.options, lambda *step: made.append(step))
        low, high = 0, len(made)
        while low < high:
            middle = (low + high) // 2
            found = interpret(made[middle][2], *arrays, function=self.name, hooks=_HOOKS)
            low, high = (low, middle) if any(self._compare(found, want, arrays)) else (middle + 1, high)
        return f"{made[low][0]} {made[low][1].name}" if low < len(made) else ""


class _LazyResults:
    """Results in 64 bits, computed on first use."""

    def __init__(self, make: Callable[[], list[np.ndarray] | None]) -> None:
        self.make = cache(make)

    def get(self, number: int) -> np.ndarray | None:
        """Return the number-th result, computed on first use; None if that fails."""
        found = self.make()
        return None if found is None else found[number]


class _OpComparison:
    """Observer of the reference interpreter that replaces its values by ours and records the first op that differs."""

    def __init__(self, ours: Mapping[Value, np.ndarray], tolerance: Tolerance | None) -> None:
        self.ours, self.tolerance = ours, tolerance
        self.op: Op | None = None
        self.frame: Activation | None = None
        self.mismatch: Mismatch | None = None
        self.number = 0

    def after(self, frame: Activation, op: Op, results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Compare the reference's ``results`` of ``op`` with ours, and let the reference continue with ours."""
        if not op.results or op.results[0] not in self.ours:
            return results
        mine = [self.ours[v] for v in op.results]
        if self.op is None:
            self._compare(frame, op, mine, results)
        return mine

    def _compare(self, frame: Activation, op: Op, mine: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        """Compare our results ``mine`` of an op with the reference's, and record the first mismatch."""
        exact = _LazyResults(lambda: wide_results(frame, op))
        terms = OPS[op.name].terms(op.attrs, [frame.environment[v].shape for v in op.operands])
        for n, (a, b) in enumerate(zip(mine, results, strict=True)):
            truth = partial(exact.get, n)
            if OPS[op.name].tolerance is None:
                found = compare_results(a, b, self.tolerance, truth)
            else:
                found = compare_op(op.name, a, b, truth, self.tolerance, terms)
            if found:
                self.op, self.number, self.mismatch = op, n, found
                self.frame = Activation(frame.module, frame.dims)
                self.frame.environment = dict(frame.environment)
                return


def _ops_to_compare(region: Region) -> list[Op]:
    """Return the ops to compare: all except those that only move or create values."""
    return [op for op in region.ops if op.results and op.name not in FREE]


def _values_read_later(body: Region, count: int, wanted: set[Value]) -> list[Value]:
    """Return the values of ``wanted`` that ops from index ``count`` on read, directly or through movement ops."""
    makers = {v: op for op in body.ops[:count] for v in op.results}
    later = [op for top in body.ops[count:] for op in (top, *(o for r in top.regions for o in walk(r)))]
    stack = [*(v for op in later for v in op.operands), *body.results]
    stack += [v for op in later for r in op.regions for v in r.results]
    found: set[Value] = set()
    seen: set[Value] = set()
    while stack:
        v = stack.pop()
        if v in seen:
            continue
        seen.add(v)
        if v in wanted:
            found.add(v)
        elif v in makers:
            stack += makers[v].operands
    return [v for op in body.ops[:count] for v in op.results if v in found]


def _function_with_results(function: Function, values: Sequence[Value]) -> Function:
    """Return a copy of ``function`` whose results are ``values``."""
    kept = ("arg_names", "sizes", "requirements")
    body = Region(function.body.params, function.body.ops, tuple(values))
    return replace(function, body=body, attrs={k: v for k, v in function.attrs.items() if k in kept})


def call_user(op: Op, operands: Sequence[np.ndarray], types: Sequence[TensorType]) -> list[np.ndarray]:
    """Call the user's function registered for the custom call ``op`` with ``operands``.

    Raises
    ------
    CompileError
        If no function is registered, or it raises.
    """
    call = describe_custom_call(op)
    known = registered_call(call.name)
    if known is None or known.function is None:
        hint = "register it before, in a file that --custom-calls names"
        raise CompileError.at(op.loc, f"no function is registered for custom call @{call.name}", hint=hint)
    results = [np.zeros(static_sizes(t), to_numpy(t.dtype)) for t in types]
    for result, operand in op.attrs.get("aliases", ()):
        results[result][...] = operands[operand]
    arrays = [np.ascontiguousarray(a) for a in (*operands, *results)]
    seen = [
        _short_floats_as_bits(a, t.dtype) if known.native else a
        for a, t in zip(arrays, _result_types_of(op, types), strict=True)
    ]
    try:
        known.function(*seen, **call.attributes)
    except Exception as error:
        message = f"custom call @{call.name}: its function raises {type(error).__name__}: {error}"
        raise CompileError.at(op.loc, message) from error
    return arrays[len(operands) :]


def _result_types_of(op: Op, results: Sequence[TensorType]) -> list[TensorType]:
    return [*(v.type for v in op.operands), *results]


def _short_floats_as_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return floats of at most 16 bits as unsigned integers with the same bits, as compiled functions receive them."""
    row = DTYPES[dtype]
    return array.view(f"u{row.size}") if row.kind == "f" and row.bits <= 16 else array


_HOOKS = Hooks(custom_call=call_user)

__all__ = ["CheckReport", "Checker", "Difference"]


# ---------------------------------------------------------------- the whole

# Sizes to try for symbolic dims, simple ones first.
_SIZES = (3, 2, 4, 8, 1, 6, 16, 12, 5, 7, 32, 64)
# Combinations of sizes to try for a model that reports invalid sizes only by refusing them.
MOST_TRIES = 20000


def check_call(
    checker: Checker, given: Sequence[Any], sizes: Mapping[str, int], seed: int, *, oracle: str, bisect: bool
) -> CheckReport:
    """Compare a call with the arguments ``given``, completed by random ones; see :func:`check`."""
    arrays, made = sample_check_arguments(checker, given, sizes, seed)
    try:
        return replace(checker.check(arrays, oracle, bisect), arguments=made)
    except (OperandError, AssertionFailed) as error:
        raise arguments_do_not_fit_error(error) from None


def arguments_do_not_fit_error(error: Exception) -> CallError:
    """Return the error for arguments that a function does not accept."""
    return CallError("", f"the arguments do not fit: {error}", hint="--input and --dim say what they are")


def has_values(example: object) -> bool:
    """Return True for an array or a number, False for a shape and dtype without values (``jax.ShapeDtypeStruct``)."""
    return hasattr(example, "__array__") or isinstance(example, bool | int | float | complex)


def sample_check_arguments(
    checker: Checker, given: Sequence[Any], sizes: Mapping[str, int], seed: int
) -> tuple[list[np.ndarray], str]:
    """Complete the arguments ``given`` by random ones; return all, and a text about their origin.

    Raises
    ------
    CallError
        If no sizes of the dims fit.
    """
    rows = checker.arguments
    arrays = [np.asarray(x, to_numpy(row["dtype"])) for x, row in zip(given, rows)]
    if len(arrays) == len(rows):
        return arrays, ""
    names = [name for name in checker.symbols() if name not in sizes]
    typical = checker.whole.typical
    choices = [(*([typical[name]] if name in typical else []), *_SIZES) for name in names]
    for numbers in islice(product(*choices), MOST_TRIES):
        tried = {**sizes, **dict(zip(names, numbers))}
        try:
            found = [*arrays, *make_values(rows[len(arrays) :], tried, True, seed)]
        except (CallError, ValueError):
            continue
        if not tried or checker.fits(found):
            shown = ", ".join(f"{name}={size}" for name, size in sorted(tried.items()))
            rest = " after those that are given" if arrays else ""
            return found, f"random arguments{rest}, seed {seed}{': ' + shown if shown else ''}"
    raise CallError("", "no sizes were found that fit the model's dims", hint="give them: --dim=NAME=SIZE, or --input")
