"""Limits of a module: the number of concurrent calls, and the duration of a call."""

from __future__ import annotations

from numbers import Integral, Real
from sys import float_info
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.errors import ArgumentValueError


class Limits(NamedTuple):
    """Limits that hold for all calls of a module.

    Attributes
    ----------
    in_flight : int
        Maximum number of concurrent calls, others wait; 0 for no limit.
    seconds : float or None
        Maximum duration of a call, counted from its submission.
    """

    in_flight: int = 0
    seconds: float | None = None

    def timeout_of_call(self, where: str, requested: Any) -> float | None:
        """Return the maximum duration of a call in seconds: the minimum of the module's limit and of ``requested``.

        Raises
        ------
        CallError
            If ``requested`` is not a finite number of at least 0.
        """
        if requested is None:
            return self.seconds
        number = isinstance(requested, int | float | np.integer | np.floating) and not isinstance(requested, bool)
        if not number or not 0 <= requested <= float_info.max:  # also refuses NaN
            raise ArgumentValueError(
                where, "the deadline is not in the future", repr(requested)[:80], "seconds from now, 0 or more"
            )
        return float(requested) if self.seconds is None else min(float(requested), self.seconds)


NO_LIMITS = Limits()


def validate_limits(max_in_flight: Any, timeout: Any) -> Limits:
    """Validate the limits of a module.

    Raises
    ------
    CallError
        If a limit is not positive.
    """
    number = isinstance(max_in_flight, Integral) and not isinstance(max_in_flight, bool) and int(max_in_flight) > 0
    if max_in_flight is not None and not number:
        raise ArgumentValueError(
            "", f"max_in_flight is {max_in_flight!r}"[:80], expected="a number of calls, 1 or more"
        )
    real = isinstance(timeout, Real) and not isinstance(timeout, bool) and 0 < float(timeout) < float("inf")
    if timeout is not None and not real:
        raise ArgumentValueError("", f"timeout is {timeout!r}"[:80], expected="seconds for each call, more than 0")
    return Limits(int(max_in_flight or 0), None if timeout is None else float(timeout))
