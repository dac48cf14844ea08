"""Search for the dispatch of a call that computes the first NaN or infinity from finite numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aotc.vmfb.abi import Command, operand_value
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.profile.trace import Parameter, StepMemory, Stepper, read_kernel_header

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.memory.pointers import PointerTable
    from aotc.vmfb.profile.trace import StepExecutable


class NonFiniteValue(NamedTuple):
    """A NaN or infinity, and where it was computed.

    Attributes
    ----------
    value : str
        ``nan``, ``inf`` or ``-inf``.
    kernel, loc : str
        The kernel that computes it, and its line of the model; empty for an argument.
    step : int
        Number of the dispatch, from 0; -1 for an argument.
    array : str
        ``argument 0``, or the output of the kernel.
    at : tuple of int
        Index of the value.
    elements : int
        Number of non-finite elements of the array.
    """

    value: str
    kernel: str
    loc: str
    step: int
    array: str
    at: tuple[int, ...]
    elements: int

    def __str__(self) -> str:
        """Format the value for users: kernel, array, index, source line."""
        place = f"{self.array}[{', '.join(map(str, self.at))}]"
        more = f", {self.elements:,} elements are not finite" if self.elements > 1 else ""
        if self.step < 0:
            return f"{place} is {self.value}{more}"
        loc = f" ({self.loc})" if self.loc else ""
        return f"dispatch {self.step}, {self.kernel}{loc}, computes {self.value}: {place}{more}"


def first_non_finite(
    x: np.ndarray, dtype: str, before: np.ndarray | None = None
) -> tuple[str, tuple[int, ...], int] | None:
    """Find the first non-finite value of ``x``, NaN before infinity.

    Parameters
    ----------
    x : numpy.ndarray
    dtype : str
    before : numpy.ndarray, optional
        Content before an update in place: non-finite values that it already had are not reported, even at other
        indices.

    Returns
    -------
    tuple of (str, tuple of int, int), or None
        ``nan``, ``inf`` or ``-inf``; its index; the number of non-finite elements. None if all are finite.
    """
    masks = _nan_and_infinity_masks(x, dtype)
    if before is not None:
        masks = [_newly_non_finite(mask, old) for mask, old in zip(masks, _nan_and_infinity_masks(before, dtype))]
    nan, infinite = masks
    first = nan if nan.any() else infinite
    if not first.any():
        return None
    at = tuple(int(i) for i in np.argwhere(first)[0])
    negative = DTYPES[dtype].kind == "f" and first is infinite and x[at] < 0
    return "nan" if first is nan else "-inf" if negative else "inf", at, int((nan | infinite).sum())


def _nan_and_infinity_masks(x: np.ndarray, dtype: str) -> list[np.ndarray]:
    """Return masks of the NaNs and the infinities of an array."""
    kind = DTYPES[dtype].kind
    if kind not in "fc":
        return [np.zeros(x.shape, bool)] * 2
    wide = x.astype(np.complex128 if kind == "c" else np.float64) if x.dtype.isbuiltin != 1 else x
    nan = np.isnan(wide)
    return [nan, ~np.isfinite(wide) & ~nan]


def _newly_non_finite(now: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the mask of elements in ``now`` that are not in ``before``.

    All are False if ``now`` has no more elements than ``before``: a sort may have moved the values.
    """
    return now & ~before & (np.count_nonzero(now) > np.count_nonzero(before))


class FiniteWatch(Stepper):
    """Stepper that checks the outputs of each dispatch for NaN and infinity.

    ``found`` has the first NaN and the first infinity.
    """

    def __init__(
        self, executable: StepExecutable, slots: PointerTable, scratch: c_void_p, memory: StepMemory,
        where: str, found: dict[str, NonFiniteValue],
    ) -> None:  # fmt: skip
        super().__init__(executable, slots, scratch, memory, where)
        self.found = found
        self.count = 0

    def _dispatch(self, command: Command, run: Callable[[], None]) -> None:
        """Run a dispatch, and record outputs that are not finite although its inputs are."""
        name, text, *_ = self.kernels[command.kernel]
        loc = self.location_of(command)
        header = read_kernel_header(text)
        sizes = dict(zip(header.dims, [operand_value(word, self.parameters) for word in command.dims], strict=True))
        rows = list(zip(command.places, header.parameters, strict=True))
        checked = self._run_checked()
        before = {kind for place, p in rows if (kind := self._kind_of_input(place, p, sizes))} if checked else set()
        outputs = [(place, p) for place, p in rows if p.output]
        old = [self.read_array(place, p, sizes) for place, p in outputs[: header.updated]] if checked else []
        run()
        for (place, p), was in zip_longest(outputs, old):
            odd = first_non_finite(self.read_array(place, p, sizes), p.dtype, was) if self._run_checked() else None
            kind = "" if odd is None else odd[0].lstrip("-")
            # NaN computed from an infinity is reported; a value that is only passed on is not.
            if odd is not None and kind not in self.found and kind not in before:
                self.found[kind] = NonFiniteValue(odd[0], name, loc, self.count, f"output {p.name}", *odd[1:])
        self.count += 1

    def _run_checked(self) -> bool:
        return len(self.found) < 2

    def _kind_of_input(self, place: tuple[int, int], p: Parameter, sizes: dict[str, int]) -> str:
        """Return ``nan`` or ``inf`` for an input with such elements, else an empty string; also for outputs."""
        odd = None if p.output else first_non_finite(self.read_array(place, p, sizes), p.dtype)
        return "" if odd is None else odd[0].lstrip("-")


def run_with_finite_watch(
    function: RuntimeFunction, arrays: Sequence[Any]
) -> tuple[list[np.ndarray], list[NonFiniteValue]]:
    """Run a loaded function one command at a time, and check each dispatch for NaN and infinity.

    Returns
    -------
    results : list of numpy.ndarray
    found : list of NonFiniteValue
        The first NaN and the first infinity, in the order of occurrence.

    Raises
    ------
    CallError
        As for a trace.
    """
    found: dict[str, NonFiniteValue] = {}
    given: dict[str, NonFiniteValue] = {}
    for number, (argument, x) in enumerate(zip(function.arguments, arrays)):
        odd = first_non_finite(np.asarray(x), argument.dtype_name)
        if odd is not None:
            given.setdefault(odd[0].lstrip("-"), NonFiniteValue(odd[0], "", "", -1, f"argument {number}", *odd[1:]))
    results = function.step(arrays, partial(FiniteWatch, where=function.where, found=found))
    return results, sorted([*given.values(), *found.values()], key=lambda o: o.step)
