"""Compare what is compiled with what the model means, and find the first op and the pass that are at fault.

Three questions, each answered by running the model:

1. Do the bundle's results agree with the oracle's (the reference interpreter, or XLA)?
2. Which op is the first to compute something else? The model is compiled once more with the result of every op
   as a result of the function. In the order of the program the reference applies each op to *our* operands, so that
   an op is judged by its own error alone, in units in the last place. A loop or a branch that differs is entered.
   If no op is wrong by itself, prefixes of the program are compiled: the shortest that differs ends at the op.
3. After which pass does the result change? The IR after each pass is run by the reference interpreter.

If weights are quantised, the first question is asked of the program with rounded weights, which the reference runs too,
and how far its results are from those of the model is told; the other questions are asked of the model as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

import aotc
from aotc.diagnostics import UNKNOWN, CompileError, Loc
from aotc.driver.assemble import Ahead, assemble
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import Raw
from aotc.frontend.xla import run_xla
from aotc.guard import THEIRS, callers_errors, guard
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import FREE, OPS
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured, walk
from aotc.ir.tensor.run import Activation, ArgumentError, Hooks, bind_arguments, interpret
from aotc.ir.tensor.substitute_dims import with_dims
from aotc.ir.tensor.wide import wide_call, wide_results
from aotc.lowering.lower import lower
from aotc.lowering.passes.inline import inline
from aotc.options import Options
from aotc.pipeline import Pass, run_passes
from aotc.targets import resolve
from aotc.tools.agreement import Deviation, Mismatch, Tolerance, compare_op, compare_results, deviation
from aotc.tools.user_calls import call_user

QUANTIZE = "quantize-weights"  # name of the pass


@dataclass(frozen=True, slots=True)
class Difference:
    """The first op whose result differs.

    ``within`` are the loops and branches around it, outermost first. ``alone`` tells whether
    the op is wrong by itself; otherwise only a program that ends with it differs.
    """

    op: str
    type: str
    loc: Loc
    mismatch: Mismatch
    within: tuple[str, ...] = ()
    alone: bool = True
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What a check found: a mismatch or None for each result, the first op that differs, the pass that changes it.

    ``rounding`` is how far results are from the model's because weights are quantised; None for integers.
    """

    results: tuple[Mismatch | None, ...]
    names: tuple[str, ...]
    difference: Difference | None = None
    changed_by: str = ""
    reference: tuple[Mismatch | None, ...] = field(default=())
    rounding: tuple[Deviation | None, ...] = ()

    @property
    def agrees(self) -> bool:
        """Tell whether nothing differs."""
        return self.difference is None and not any(self.results)


# Iterations of a differing loop that are searched for the op that differs. The reference runs each one; this bounds the
# search to seconds.
MOST_ITERATIONS = 256


class Checker:
    """A model, ready to be compared.

    Parameters
    ----------
    raw : Raw
        The model.
    options : Options
        How to compile; one CPU target.
    function : str
        Which public function; the only one, or main.
    tolerance : Tolerance, optional
        In place of the bounds of ``aotc.tools.agreement``.
    """

    def __init__(self, raw: Raw, options: Options, function: str = "", tolerance: Tolerance | None = None) -> None:
        self.raw, self.tolerance = raw, tolerance
        target = resolve(options.target)[0].name  # of all devices: one of another kind may not be here
        devices = dict.fromkeys(options.devices, target)
        self.whole = replace(options, target=target, devices=devices, specialize={})
        self.options = replace(self.whole, quantize_weights="none")  # of parts of the model
        self.module = import_raw(raw, options=self.options)
        public = [name for name, f in self.module.functions.items() if f.public]
        self.name = function or (public[0] if len(public) == 1 else "main")
        if self.name not in public:
            hint = f"--function with one of {', '.join(public)}"
            raise CompileError.at(UNKNOWN, f"the model has no public function {self.name!r}", hint=hint)
        with guard("while inlining", self.options, self.module, raw.path):
            self.function = inline(self.module, self.options).functions[self.name]

    @callers_errors()
    def check(self, arrays: Sequence[np.ndarray], oracle: str = "reference", bisect: bool = False) -> CheckReport:
        """Compare everything for one call with ``arrays``; ``oracle`` is ``reference`` or ``jax``.

        Raises
        ------
        ArgumentError
            If ``arrays`` do not fit the function.
        AssertionFailed
            If an assertion of the model fails on them.
        """
        passing = (*THEIRS, ArgumentError, AssertionFailed)
        with guard("while comparing with the reference", self.options, self.module, self.raw.path, passing):
            return self._report(arrays, oracle, bisect)

    def _report(self, arrays: Sequence[np.ndarray], oracle: str, bisect: bool) -> CheckReport:
        ours = self.run(self.module, self.name, arrays, self.whole)
        reference = interpret(self.module, *arrays, function=self.name, hooks=_HOOKS)
        want = reference
        of_reference: tuple[Mismatch | None, ...] = ()
        if oracle == "jax":
            want = run_xla(self.raw, arrays, self.name)
            of_reference = self._compare(reference, want, arrays)
        rounding: tuple[Deviation | None, ...] = ()
        if self.whole == self.options:
            results = self._compare(ours, want, arrays)
        else:
            rounding = tuple(map(deviation, ours, want))
            rounded = self._rounded(arrays)
            results = tuple(compare_results(a, b, self.tolerance) for a, b in zip(ours, rounded, strict=True))
        difference = self._first(self.function, arrays)
        if difference is None and not rounding and any(self._compare(ours, reference, arrays)):
            difference = self._shortest(arrays)
        changed = self.changed_by(arrays) if bisect and (difference or any(results)) else ""
        names = tuple(self.function.attrs.get("result_names") or [f"result{n}" for n in range(len(ours))])
        return CheckReport(results, names, difference, changed, of_reference, rounding)

    def _rounded(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return what the reference makes of the program as soon as its weights are quantised."""
        steps = replace(self.whole, stop_after=QUANTIZE)
        return interpret(run_passes(self.module, steps), *arrays, function=self.name, hooks=_HOOKS)

    def symbols(self) -> list[str]:
        """Return the names of the symbolic dims of the arguments."""
        dims = (d for p in self.function.body.params for d in p.type.shape)
        return sorted({s.name for d in dims for s in symbols(d)} - set(self.function.attrs.get("sizes", ())))

    def fits(self, arrays: Sequence[np.ndarray]) -> bool:
        """Tell whether the shapes and sizes in ``arrays`` are what the function accepts."""
        try:
            bind_arguments(self.function, arrays)
        except (ArgumentError, AssertionFailed):
            return False
        return True

    def run(
        self, module: Module, name: str, arrays: Sequence[np.ndarray], options: Options | None = None
    ) -> list[np.ndarray]:
        """Compile ``module`` and return the results of its function ``name``."""
        chosen = options or self.options
        (target,) = resolve(chosen.target)
        with Ahead(module, chosen) as ahead:
            variant = lower(run_passes(module, chosen), target, chosen, ahead.begin)
            return aotc.load(assemble(module, [variant], chosen, ahead)).invoke(name, *arrays)

    def _compare(
        self, ours: Sequence[np.ndarray], want: Sequence[np.ndarray], arrays: Sequence[np.ndarray]
    ) -> tuple[Mismatch | None, ...]:
        """Compare results of the whole function for a call with ``arrays``."""
        exact = _Lazy(lambda: wide_call(self.function, arrays, _HOOKS))
        pairs = enumerate(zip(ours, want, strict=True))
        return tuple(compare_results(a, b, self.tolerance, partial(exact.get, n)) for n, (a, b) in pairs)

    # --- the first op that differs ---

    def _first(self, function: Function, arrays: Sequence[np.ndarray]) -> Difference | None:
        """Return the first op of ``function`` that is wrong by itself."""
        values = [v for op in _seen(function.body) for v in op.results]
        probe = _with_results(function, values)
        found = self.run(Module({probe.name: probe}), probe.name, arrays)
        watch = _Watch(dict(zip(values, found, strict=True)), self.tolerance)
        hooks = replace(_HOOKS, after=watch.after)
        interpret(Module({function.name: function}), *arrays, function=function.name, hooks=hooks)
        if watch.op is None or watch.frame is None or watch.mismatch is None:
            return None
        inner = self._enter(watch.op, watch.frame)
        if inner is not None:
            return inner
        return self._difference(watch.op, watch.number, watch.mismatch)

    def _enter(self, op: Op, frame: Activation) -> Difference | None:
        """Return the first op that differs inside of a loop or branch, on the values that the reference has there."""
        if op.name == "case":
            index = int(frame.environment[op.operands[0]])
            number = index if 0 <= index < len(op.regions) else len(op.regions) - 1
            return self._region(op.regions[number], [], frame, f"branch {number} of case", op.loc)
        if op.name != "while":
            return None
        carried = [frame.environment[v] for v in op.operands]
        fresh = Activation(frame.module, frame.dims, (), _HOOKS)
        fresh.environment = dict(frame.environment)
        condition, body = op.regions
        for iteration in range(MOST_ITERATIONS):
            for region, what in ((condition, "condition"), (body, "body")):
                found = self._region(region, carried, frame, f"{what} of while, iteration {iteration}", op.loc)
                if found is not None:
                    return found
            if not bool(fresh.run(condition, carried)[0]):
                break
            carried = fresh.run(body, carried)
        return None

    def _region(
        self, region: Region, arrays: Sequence[np.ndarray], frame: Activation, what: str, loc: Loc
    ) -> Difference | None:
        outer = captured(region)
        body = Region((*region.params, *outer), region.ops, region.results)
        function = with_dims(Function("region", body, True), frame.dims)
        found = self._first(function, [*arrays, *(frame.environment[v] for v in outer)])
        return None if found is None else replace(found, within=(f"{what} at {loc}", *found.within))

    def _difference(self, op: Op, number: int, mismatch: Mismatch) -> Difference:
        """Describe a difference, with the kernels of the model into which ops of the place of ``op`` went."""
        fused = run_passes(Module({self.name: self.function}), self.options)
        private = (f for f in fused.functions.values() if not f.public)
        kernels = tuple(f.name for f in private if any(inner.loc is op.loc for inner in f.body.ops))
        return Difference(op.name, str(op.results[number].type), op.loc, mismatch, (), True, kernels)

    def _shortest(self, arrays: Sequence[np.ndarray]) -> Difference | None:
        """Return the last op of the shortest prefix of the program whose values differ."""
        ops = _seen(self.function.body)
        recorded: dict[Value, np.ndarray] = {}

        def record(frame: Activation, op: Op, results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
            recorded.update(zip(op.results, results))
            return results

        hooks = replace(_HOOKS, after=record)
        interpret(Module({self.name: self.function}), *arrays, function=self.name, hooks=hooks)
        low, high, worst = 0, len(ops), None
        while low < high:
            middle = (low + high) // 2
            found = self._prefix(ops[: middle + 1], arrays, recorded)
            if found is None:
                low = middle + 1
            else:
                high, worst = middle, found
        return None if worst is None else replace(self._difference(*worst), alone=False)

    def _prefix(
        self, ops: Sequence[Op], arrays: Sequence[np.ndarray], want: Mapping[Value, np.ndarray]
    ) -> tuple[Op, int, Mismatch] | None:
        """Compile the program up to the last of ``ops`` and compare the values that the rest of it reads."""
        made = {v: (op, n) for op in ops for n, v in enumerate(op.results)}
        body = self.function.body
        count = body.ops.index(ops[-1]) + 1
        values = _read_later(body, count, set(made)) or list(ops[-1].results)
        probe = _with_results(replace(self.function, body=Region(body.params, body.ops[:count], ())), values)
        found = self.run(Module({probe.name: probe}), probe.name, arrays)
        for v, ours in reversed(list(zip(values, found, strict=True))):
            mismatch = compare_results(ours, want[v], self.tolerance)
            if mismatch:
                return (*made[v], mismatch)
        return None

    # --- the pass ---

    def changed_by(self, arrays: Sequence[np.ndarray]) -> str:
        """Return number and name of the pass after which the interpreted result differs first; empty if none does."""
        want = interpret(self.module, *arrays, function=self.name, hooks=_HOOKS)
        made: list[tuple[int, Pass, Module]] = []
        run_passes(self.module, self.options, lambda *step: made.append(step))
        low, high = 0, len(made)
        while low < high:
            middle = (low + high) // 2
            found = interpret(made[middle][2], *arrays, function=self.name, hooks=_HOOKS)
            low, high = (low, middle) if any(self._compare(found, want, arrays)) else (middle + 1, high)
        return f"{made[low][0]} {made[low][1].name}" if low < len(made) else ""


class _Lazy:
    """Results that are computed when one of them is asked for."""

    def __init__(self, make: Callable[[], list[np.ndarray] | None]) -> None:
        self.make = cache(make)

    def get(self, number: int) -> np.ndarray | None:
        """Return a result, or None if there are none."""
        found = self.make()
        return None if found is None else found[number]


class _Watch:
    """Follows the reference with our values in place of its own, up to the first op that differs."""

    def __init__(self, ours: Mapping[Value, np.ndarray], tolerance: Tolerance | None) -> None:
        self.ours, self.tolerance = ours, tolerance
        self.op: Op | None = None
        self.frame: Activation | None = None
        self.mismatch: Mismatch | None = None
        self.number = 0

    def after(self, frame: Activation, op: Op, results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Compare the results of ``op`` and go on with ours."""
        if not op.results or op.results[0] not in self.ours:
            return results
        mine = [self.ours[v] for v in op.results]
        if self.op is None:
            self._compare(frame, op, mine, results)
        return mine

    def _compare(self, frame: Activation, op: Op, mine: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        exact = _Lazy(lambda: wide_results(frame, op))
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


def _seen(region: Region) -> list[Op]:
    """Return the ops whose results are looked at: all but those that only move or make up values."""
    return [op for op in region.ops if op.results and op.name not in FREE]


def _read_later(body: Region, count: int, wanted: set[Value]) -> list[Value]:
    """Return the values among ``wanted`` that ops from number ``count`` on read, through ops that only move."""
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


def _with_results(function: Function, values: Sequence[Value]) -> Function:
    """Return ``function`` with ``values`` for its results."""
    kept = ("arg_names", "sizes", "requirements")
    body = Region(function.body.params, function.body.ops, tuple(values))
    return replace(function, body=body, attrs={k: v for k, v in function.attrs.items() if k in kept})


_HOOKS = Hooks(custom_call=call_user)

__all__ = ["CheckReport", "Checker", "Difference"]
