"""``aotc.tune``: search compiler decisions that make a bundle faster on this machine, and compile it with them.

The search is greedy. The first lowering records all decisions and block sizes (:mod:`aotc.lowering.tuning`). A
candidate changes one of them: it reverses a decision, or halves or doubles a block size. Candidates that compile to the
code of the best bundle so far are dropped. The others are tried in the order that the cost model predicts. Their
results are compared with XLA's, and their calls are interleaved with those of the best bundle and timed. A candidate
becomes the best if it is faster by the 95 % confidence interval. At the end the best bundle and the original are timed
once more; the original is returned unless it is slower.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import numpy as np

import aotc
from aotc.bundle import Bundle
from aotc.diagnostics import CompileError, InternalError
from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, time_text
from aotc.driver.declare_state import declare_bindings
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import RawModel
from aotc.frontend.xla import run_xla
from aotc.guard import reraise_user_errors
from aotc.ir.program.ir import Launch, walk
from aotc.ir.semantics.run import interpret
from aotc.ir.tensor.ir import Module
from aotc.lowering.cost_model.model import digest_of_program
from aotc.lowering.lower import Variant
from aotc.lowering.threshold import decided_by
from aotc.lowering.tuning import FORMAT, Answers, Choice, Decisions, choice_rows, choices_of
from aotc.options import Options
from aotc.pipeline import compile_raw, lower_for_target
from aotc.recompile import model_of, upgrade
from aotc.targets import Mix, Target
from aotc.tools.sample_arguments import sample_call
from aotc.tools.tune_trial import PROMISING, TrialProcess, TrialSetup, differing_result
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.device import choose_variant
from aotc.vmfb.errors import ArgumentValueError, BundleError, check_keywords
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.profile.measure import processor_name
from aotc.vmfb.weights.own import copy_own_weights

LOWERING_SHARE = 0.5
"""Fraction of the remaining time that is spent on lowering candidates before the first of them is timed."""

FASTER, SLOWER, SAME, WRONG, FAILED = "faster", "not faster", "same code", "wrong results", "failed"


@dataclass(frozen=True, slots=True)
class TuningTrial:
    """Outcome of one candidate of a search.

    Attributes
    ----------
    choice : Choice
        The changed decision or block size.
    outcome : str
        ``faster``, ``not faster``, ``same code``, ``wrong results`` or ``failed``.
    ratio : float or None
        Time of a call divided by that of the best bundle so far; None if the candidate was not timed.
    why : str
        The wrong result or the error; empty for other outcomes.
    """

    choice: Choice
    outcome: str
    ratio: float | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class TuneResult(DisplayedResult):
    """The result of :func:`aotc.tune`.

    Attributes
    ----------
    bundle : Bundle
        The tuned bundle; the original one if no choice makes it faster.
    record : dict
        The tuning record, for ``aotc.compile(..., tuning=record)``.
    trials : tuple of TuningTrial
        The candidates in the order of their trials.
    before, after : float
        Median seconds of a call of the original and of the tuned bundle.
    ratio : tuple of float
        Time of the tuned bundle's calls divided by that of the original's, and its 95 % confidence interval.
    untried : int
        Number of candidates that were not tried within the budget.
    """

    bundle: Bundle
    record: dict[str, Any]
    trials: tuple[TuningTrial, ...]
    before: float
    after: float
    ratio: tuple[float, float, float]
    untried: int

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Return the choices of the tuned bundle."""
        return choices_of(self.record)

    def document(self) -> Document:
        """Return the report: accepted choices with their gains, counts of outcomes, and times before and after."""
        faster = [trial for trial in self.trials if trial.outcome == FASTER]
        final = [trial for trial in faster if trial.choice in self.choices]  # a later choice may replace one
        rows = [(str(t.choice), "" if t.ratio is None else _speedup_text(t.ratio)) for t in final]
        counts = {name: sum(t.outcome == name for t in self.trials) for name in (SLOWER, SAME, WRONG, FAILED)}
        outcomes = [f"{len(faster)} {FASTER}", *(f"{count} {name}" for name, count in counts.items() if count)]
        blocks: list[Block] = [table([Column("choice"), Column("faster", True)], rows)] if rows else []
        blocks.append(Line(f"{count_text(len(self.trials), 'candidate')} tried: {', '.join(outcomes)}"))
        if self.untried:
            blocks.append(Line(f"{count_text(self.untried, 'candidate')} left: a longer --budget tries more"))
        low, high = self.ratio[1:]
        interval = f"{_speedup_text(self.ratio[0])} faster [{_speedup_text(high)}, {_speedup_text(low)}]"
        times = f"{time_text(self.before)} before, {time_text(self.after)} after"
        unchanged = "the bundle stays as it is: no choice makes it faster"
        blocks.append(Line(f"{times}: {interval}" if self.choices else unchanged))
        return Document("", tuple(blocks))


def _speedup_text(ratio: float) -> str:
    """Format a ratio of times as a speedup: 0.5 is ``2.00x``."""
    return f"{1 / ratio:.2f}x"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A choice and its lowered program: code digest, predicted nanoseconds, and all decisions of the lowering."""

    choice: Choice | None
    digest: str
    predicted: float
    answers: Answers


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """Settings of a search.

    Attributes
    ----------
    budget : float
        Seconds of the search. Loading, the reference and the last measurement take some seconds more.
    devices : str or sequence of str, optional
        The device to tune for, as in :func:`aotc.load`.
    threads : int, optional
        Threads of the timed calls; by default one per core.
    weights : str or path, optional
        As in :func:`aotc.upgrade`: the new file, if the weights of the bundle are in a file.
    progress : callable, optional
        ``progress(text)`` is called with each step of the search.
    """

    budget: float = 60.0
    devices: str | Sequence[str] | None = None
    threads: int | None = None
    weights: str | os.PathLike[str] | None = None
    progress: Callable[[str], object] | None = None


class TuneKeywords(TypedDict, total=False):
    """The fields of :class:`TuneSettings`, as keywords of :func:`aotc.tune`."""

    budget: float
    devices: str | Sequence[str] | None
    threads: int | None
    weights: str | os.PathLike[str] | None
    progress: Callable[[str], object] | None


@reraise_user_errors()
def tune(
    bundle: str | os.PathLike[str] | bytes, *, function: str = "", inputs: Sequence[Any] = (),
    sizes: Mapping[str, int] = MappingProxyType({}), **settings: Unpack[TuneKeywords],
) -> TuneResult:  # fmt: skip
    """Search compiler decisions that make a bundle faster on this machine, and compile it with them.

    An interrupt (Ctrl-C) ends the search early, and what it has found is the result. Results of each candidate are
    compared with XLA's on the same arguments. With the returned record, later compilations make the same choices, for
    this model or for others on the same target.

    Parameters
    ----------
    bundle : str, path or bytes
        A bundle compiled without ``--no-source``, for one device.
    function : str
        The function to tune; by default the only one, or ``main``.
    inputs : sequence of arrays
        The first arguments, flat; the others are random values.
    sizes : mapping of str to int
        Sizes of symbolic dims of the random values; others have their typical size, or 16.
    **settings
        Fields of :class:`TuneSettings`.

    Returns
    -------
    TuneResult

    Raises
    ------
    BundleError
        If the bundle is damaged, has no source, or is for several devices.
    CallError
        If there is no such function, the arguments do not fit, or the bundle's results differ from XLA's.
    CompileError
        If this compiler refuses the recorded options or model.
    """
    check_keywords("tune", settings, [f.name for f in fields(TuneSettings)])
    chosen = TuneSettings(**settings)
    budget = chosen.budget
    if not isinstance(budget, int | float) or isinstance(budget, bool) or not 0 < budget < float("inf"):
        raise ArgumentValueError("", f"budget is {budget!r}", expected="seconds, more than 0")
    with TemporaryDirectory(prefix="aotc-tune-") as folder:
        search = _Search.prepare(Path(folder), bundle, function, inputs, sizes, chosen)
        with search.start_trials() as process:
            trials, untried = search.run(process, time.monotonic() + budget)
            tuned, measured = search.compile_best(process, chosen.weights)
    record = search.tuning_record(measured)
    ratio = (measured["ratio"], measured["low"], measured["high"])
    return TuneResult(tuned, record, trials, measured["other"], measured["seconds"], ratio, untried)


@dataclass
class _Search:
    """State of a search: the model, the arguments and expected results of its call, and the best choices so far."""

    folder: Path
    original: bytes
    raw: RawModel
    module: Module
    target: Target
    targets: tuple[Target, ...]
    options: Options
    function: str
    sizes: Mapping[str, int]
    settings: TuneSettings
    choices: tuple[Choice, ...] = ()
    trials: list[TuningTrial] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    expected: list[np.ndarray] = field(default_factory=list)
    original_path: str = ""
    best_path: str = ""

    @staticmethod
    def prepare(
        folder: Path, source: str | os.PathLike[str] | bytes, function: str, inputs: Sequence[Any],
        sizes: Mapping[str, int], settings: TuneSettings,
    ) -> _Search:  # fmt: skip
        """Load a bundle, call it once, compare its results with XLA's, and return the state of a new search."""
        opened = open_bundle(source)  # its errors name the file
        original = source if isinstance(source, bytes) else Path(source).read_bytes()
        variant, _, _ = choose_variant(opened, settings.devices)
        raw, targets, options = model_of(source)
        if variant.get("devices") or any(isinstance(t, Mix) for t in targets) or "mesh" in opened.manifest:
            raise BundleError(opened.where, "the bundle is for several devices", hint="tune a bundle for one device")
        target = next(t for t in targets if t.name == variant["target"])
        loaded = load(original, devices=settings.devices, threads=settings.threads)
        name, values = sample_call(loaded, function, inputs, sizes)
        module = declare_bindings(import_raw(raw, options=options, platform=target.kind), options)
        chosen = choices_of(options.tuning) if options.tuning.get("target") == target.name else ()
        search = _Search(
            folder, original, raw, module, target, targets, options, name, dict(sizes), settings, chosen
        )  # fmt: skip
        search._check_original(loaded, values)
        return search

    def _report_progress(self, text: str) -> None:
        if self.settings.progress is not None:
            self.settings.progress(text)

    def _check_original(self, loaded: LoadedModule, values: Sequence[Any]) -> None:
        """Call the original bundle, compute the expected results, and raise CallError if the two differ."""
        self.values = [np.asarray(x) for x in values]
        ours = [np.asarray(x) for x in loaded.invoke(self.function, *self.values)]
        self.expected = self._expected_results(self.values, ours)
        if wrong := differing_result(ours, self.expected):
            hint = "pass real arguments (--input), as random ones may amplify rounding; or see `aotc check`"
            raise aotc.CallError(self.function, f"the results of the bundle differ from XLA's: {wrong}", hint=hint)

    @contextmanager
    def start_trials(self) -> Iterator[TrialProcess]:
        """Write arguments, expected results and the original bundle to files; yield the process that runs trials."""
        self.original_path = self.best_path = self._write_file("original.vmfb", self.original)
        arguments, dtypes = self._write_arrays("arguments.npz", self.values)
        expected, expected_dtypes = self._write_arrays("expected.npz", self.expected)
        setup = TrialSetup(
            self.function, arguments, expected, dtypes, expected_dtypes, self.settings.devices, self.settings.threads
        )
        process = TrialProcess(setup, str(self.folder / "trials.log"))
        try:
            yield process
        finally:
            process.close()

    def _write_arrays(self, name: str, arrays: Sequence[np.ndarray]) -> tuple[str, list[str]]:
        """Write arrays to an ``.npz`` file; return its path, and the dtypes, as the file lacks those of ml_dtypes."""
        path = str(self.folder / name)
        np.savez(path, *(x.view(f"V{x.itemsize}") if x.dtype.kind == "V" else x for x in arrays))
        return path, [str(x.dtype) for x in arrays]

    def _expected_results(self, values: list[np.ndarray], ours: list[np.ndarray]) -> list[np.ndarray]:
        """Return the results of XLA, or of the reference interpreter if XLA lacks an op.

        Return ``ours``, the bundle's own results, if weights are quantised or bound, because XLA does not have these
        weights.
        """
        whole = len(values) == len(self.module.functions[self.function].body.params)
        if self.options.quantize_weights != "none" or not whole:
            return ours
        try:
            return run_xla(self.raw, values, self.function)
        except CompileError:  # a traced function has ops of CHLO that XLA does not know
            return interpret(self.module, *values, function=self.function)

    def _write_file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    # ------------------------------------------------------------ the search

    def run(self, process: TrialProcess, end: float) -> tuple[tuple[TuningTrial, ...], int]:
        """Try candidates until ``end`` (of ``time.monotonic``) or an interrupt.

        Returns
        -------
        trials : tuple of TuningTrial
        untried : int
            Number of candidates that were not tried.
        """
        best = self._lower(None)
        waiting, ready = self._shuffled(_changed_choices(best.answers, {})), list[_Candidate]()
        self._report_progress(f"{len(waiting)} candidates for {self.function} on {self.target.name}")
        with suppress(KeyboardInterrupt):  # ends the search; what it has found is the result
            while (left := end - time.monotonic()) > 0:
                ready = ready or self._lower_all(waiting, best, end - (1 - LOWERING_SHARE) * left)
                if not ready:
                    break
                candidate = ready.pop(0)
                number = len(self.trials) + 1
                self._report_progress(f"candidate {number} of {number + len(ready) + len(waiting)}: {candidate.choice}")
                trial = self._run_trial(process, candidate)
                self.trials.append(trial)
                if trial.outcome == FASTER:
                    self.choices = _with_choice(self.choices, trial.choice)
                    self._report_progress(f"{trial.choice}: {_speedup_text(trial.ratio or 1.0)} faster")
                    # The new choice may change the code of lowered candidates.
                    lowered = [c.choice for c in ready if c.choice is not None]
                    following = _changed_choices(candidate.answers, best.answers)
                    waiting[:0] = [*_next_block_sizes(trial.choice), *following, *lowered]
                    best, ready = candidate, []
        return tuple(self.trials), len(ready) + len(waiting)

    def _shuffled(self, choices: Iterator[Choice]) -> list[Choice]:
        """Return the choices in a pseudorandom order with a fixed seed.

        Successive choices concern similar decisions, so a short budget would try only one kind of them.
        """
        found = list(choices)
        random.Random(0).shuffle(found)
        return found

    def _lower_all(self, waiting: list[Choice], best: _Candidate, end: float) -> list[_Candidate]:
        """Lower choices until ``end``; return candidates whose code differs from ``best``, sorted by predicted time.

        Lowered choices are removed from ``waiting``.
        """
        found: dict[str, _Candidate] = {}
        while waiting and time.monotonic() < end:
            choice = waiting.pop(0)
            try:
                candidate = self._lower(choice)
            except (CompileError, InternalError) as error:
                self.trials.append(TuningTrial(choice, FAILED, why=str(error).splitlines()[0]))
                continue
            if candidate.digest == best.digest or candidate.digest in found:
                self.trials.append(TuningTrial(choice, SAME))
            else:
                found[candidate.digest] = candidate
        return sorted(found.values(), key=lambda c: c.predicted)

    def _lower(self, choice: Choice | None) -> _Candidate:
        """Lower the model with the best choices so far and, unless it is None, ``choice``."""
        decisions = Decisions(self.choices if choice is None else _with_choice(self.choices, choice))
        options = replace(self.options, tuning={}, devices={}, verify_each=False)
        with decided_by(decisions):
            variant, _ = lower_for_target(self.module, self.target, self.targets, options, lambda *_: None)
        programs = {name: program.code for name, program in variant.programs.items()}
        code = f"{variant.text}\n{variant.command_buffers}\n{programs}"
        digest = sha256(code.encode()).hexdigest()
        return _Candidate(choice, digest, _predicted_nanoseconds(variant, self.function), decisions.answers)

    def _run_trial(self, process: TrialProcess, candidate: _Candidate) -> TuningTrial:
        """Compile a candidate, check its results, and time it against the best bundle, which it replaces if faster."""
        assert candidate.choice is not None
        choices = _with_choice(self.choices, candidate.choice)
        try:
            path = self._write_file(f"candidate{len(self.trials)}.vmfb", self._compile(choices))
        except (CompileError, InternalError) as error:
            return TuningTrial(candidate.choice, FAILED, why=str(error).splitlines()[0])
        found = process.run(path, self.best_path)
        faster = found.get("high", 1) < 1 and found["ratio"] <= PROMISING  # a smaller gain is the noise of addresses
        if faster:
            path, self.best_path = self.best_path, path
        if path != self.original_path:
            os.unlink(path)
        if why := found.get("wrong") or found.get("failed"):
            return TuningTrial(candidate.choice, WRONG if "wrong" in found else FAILED, why=why)
        return TuningTrial(candidate.choice, FASTER if faster else SLOWER, found["ratio"])

    def _compile(self, choices: Sequence[Choice]) -> bytes:
        options = replace(self.options, tuning=self._record_without_times(choices), weights="inline", source=False)
        return copy_own_weights(open_bundle(self.original), compile_raw(self.raw, (self.target,), options))

    # ------------------------------------------------------------ the result

    def compile_best(
        self, process: TrialProcess, weights: str | os.PathLike[str] | None
    ) -> tuple[Bundle, dict[str, Any]]:
        """Compile the best choices, and time them against the original; return the faster bundle and the times."""
        if any(t.outcome == FASTER for t in self.trials):
            tuned = upgrade(self.original, tuning=self._record_without_times(self.choices), weights=weights)
            found = process.run(self._write_file("tuned.vmfb", tuned), self.original_path, full=True)
            if not found.get("wrong") and not found.get("failed") and found["high"] < 1:
                return tuned, found
        self.choices = ()
        alone = process.run(self.original_path, self.original_path, full=True)
        seconds = alone.get("other", 0.0)
        return Bundle(self.original), {"seconds": seconds, "other": seconds, "ratio": 1.0, "low": 1.0, "high": 1.0}

    def tuning_record(self, measured: Mapping[str, float]) -> dict[str, Any]:
        """Return the tuning record of the best choices, with the measured times."""
        times = {"before": float(measured["other"]), "after": float(measured["seconds"])}
        return {**self._record_without_times(self.choices), "seconds": times}

    def _record_without_times(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            "format": FORMAT, "producer": f"aotc {aotc.__version__}", "program": digest_of_program(self.module),
            "target": self.target.name, "function": self.function, "sizes": dict(self.sizes),
            "machine": {"cpu": processor_name(), "cores": os.cpu_count() or 1},
            "seconds": {"before": 0.0, "after": 0.0}, "choices": choice_rows(choices),
        }  # fmt: skip


def _changed_choices(answers: Answers, known: Answers) -> Iterator[Choice]:
    """Yield the choices that change one of ``answers``: a reversed decision, or a halved or doubled block size.

    Decisions that are also in ``known`` were tried before and are left out.
    """
    for (threshold, size), value in answers.items():
        if (threshold, size) in known or (isinstance(size, int) and size < 0):
            continue
        if size is not None:
            yield Choice(threshold, size, not value)
        elif value > 0:
            yield Choice(threshold, None, value * 2)
            if value > 1:
                yield Choice(threshold, None, value // 2)


def _next_block_sizes(choice: Choice) -> Iterator[Choice]:
    """Yield half and twice an accepted block size; nothing for a decision."""
    if choice.size is None:
        yield Choice(choice.threshold, None, choice.value * 2)
        if choice.value > 1:
            yield Choice(choice.threshold, None, choice.value // 2)


def _with_choice(choices: Sequence[Choice], new: Choice) -> tuple[Choice, ...]:
    """Add ``new`` to choices; it replaces a choice for the same threshold and size."""
    others = [c for c in choices if (c.threshold, c.size) != (new.threshold, new.size)]
    return (*others, new)


def _predicted_nanoseconds(variant: Variant, function: str) -> float:
    """Return the time of a function by the cost model: the sum over its launches, with one iteration per loop."""
    steps = variant.steps[function].steps
    return sum(variant.costs.of(step.kernel).ns for step in walk(steps) if isinstance(step, Launch))
