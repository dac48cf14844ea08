"""Compare a sharded model, whose ranks run as threads of this process, with the whole program on one device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import aotc
from aotc.diagnostics import UNKNOWN, CompileError
from aotc.frontend.mlir import RawModel, program_of_one_rank
from aotc.frontend.partition.one_device import for_one_device
from aotc.options import Options
from aotc.pipeline import compile_raw
from aotc.targets import resolve_targets
from aotc.tools.agreement import Tolerance
from aotc.tools.check import Checker, CheckReport, has_values, sample_check_arguments
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import CallError
from aotc.vmfb.gang.rank_processes import cause
from aotc.vmfb.ranks.cut import Cut, cut_of
from aotc.vmfb.ranks.layout import Mesh, mesh_of
from aotc.vmfb.ranks.threads import MOST_THREADS, ThreadLink, thread_links


@dataclass(frozen=True, slots=True)
class RankChecker:
    """A sharded model and its whole program for one device.

    Attributes
    ----------
    raw : RawModel
        The model for all devices.
    whole : Checker
        The same program for one device.
    options : Options
        Options of the compilation.
    """

    raw: RawModel
    whole: Checker
    options: Options

    @property
    def arguments(self) -> list[dict[str, Any]]:
        """Return the whole arguments of the function, as in a bundle's manifest."""
        return self.whole.arguments

    def check(
        self, given: Sequence[Any], sizes: Mapping[str, int], seed: int, oracle: str, ranks: int | None = None
    ) -> CheckReport:
        """Compare a call with the whole arguments ``given`` and random ones.

        Parameters
        ----------
        given, sizes, seed, oracle
            As for :func:`aotc.tools.check.check`.
        ranks : int, optional
            Number of ranks that the model must be for.

        Raises
        ------
        CompileError
            If the model is for another number of ranks, or for more than one process can have.
        CallError
            If the arguments do not fit.
        """
        arrays, made = sample_check_arguments(self.whole, given, sizes, seed)
        self.whole.require_fit(arrays)
        (target,) = resolve_targets(self.options.target)
        data = compile_raw(program_of_one_rank(self.raw), (target,), self.options)
        mesh = mesh_of(open_bundle(data).manifest["mesh"])
        _check_size(mesh, ranks)
        ours = run_on_threads(data, mesh, self.whole.name, arrays)
        report = self.whole.compare_with_oracle(ours, arrays, oracle)
        return replace(report, arguments=made, ranks=f"{mesh.size} ranks ({mesh})")


def rank_checker(raw: RawModel, options: Options, function: str, tolerance: Tolerance | None) -> RankChecker:
    """Return the checker of a model for several devices; the parameters are those of :class:`Checker`."""
    if options.quantize_weights != "none":
        hint = "--quantize-weights for the model on one device"
        raise CompileError.at(UNKNOWN, "a sharded model is checked without quantised weights", hint=hint)
    return RankChecker(raw, Checker(for_one_device(raw), options, function, tolerance), options)


def example_values(checker: RankChecker) -> list[np.ndarray]:
    """Return the example arguments of the model if all have values, else an empty list."""
    examples = checker.raw.values.get(checker.whole.name, ())
    return [np.asarray(x) for x in examples] if all(map(has_values, examples)) else []


def _check_size(mesh: Mesh, ranks: int | None) -> None:
    """Refuse a mesh of another size than ``ranks``, or of more ranks than threads allow."""
    if ranks not in (None, mesh.size):
        message = f"the model is for {mesh.size} ranks ({mesh}), and there are {ranks}"
        raise CompileError.at(UNKNOWN, message, hint=f"--ranks={mesh.size}")
    if mesh.size > MOST_THREADS:
        message = f"the model is for {mesh.size} ranks ({mesh}), and one process checks at most {MOST_THREADS}"
        raise CompileError.at(UNKNOWN, message, hint="the same model on a smaller mesh")


def run_on_threads(data: bytes, mesh: Mesh, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Run all ranks of a bundle as threads with shards of the whole arguments; return whole results.

    Raises
    ------
    CallError
        The error of a rank.
    """
    entry = open_bundle(data).manifest["functions"][name]
    arguments, results = ([cut_of(mesh, row) for row in entry[key]] for key in ("arguments", "results"))
    found: dict[int, list[Any]] = {}
    failures: dict[int, Any] = {}

    def run(link: ThreadLink) -> None:
        rank = link.rank
        try:
            with aotc.load(data, ranks=link, threads=1) as module:
                parts = [array[cut.slices[rank]] for array, cut in zip(arrays, arguments, strict=True)]
                found[rank] = module.invoke(name, *parts)
        except (CallError, aotc.BundleError) as error:
            failures[rank] = error
        except Exception as error:  # of a custom call; the caller's thread reports it
            failures[rank] = CallError(name, f"{type(error).__name__}: {error}")
        finally:
            link.close("failed" if rank in failures else "closed the module")

    threads = [threading.Thread(target=run, args=(link,), daemon=True) for link in thread_links(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise cause(failures)
    return [_whole_array_of_parts(cut, [found[rank][n] for rank in range(mesh.size)]) for n, cut in enumerate(results)]


def _whole_array_of_parts(cut: Cut, parts: Sequence[np.ndarray]) -> np.ndarray:
    """Assemble a whole array from the parts of all ranks."""
    whole = np.empty(cut.whole, cut.dtype)
    for rank in cut.distinct:
        whole[cut.slices[rank]] = parts[rank]
    return whole
