"""Current values of a state, and the lock that its calls take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.api.named_values import place_argument
from aotc.vmfb.arguments import Argument
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.errors import CallError, DeadlineExceeded, FenceCancelled
from aotc.vmfb.host.locks import new_lock

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeFunction


class StateValues:
    """The current value of each leaf of a state, by name.

    This object does not reference the module, so that it does not keep the module alive.

    Parameters
    ----------
    where : str
        The module, for messages.
    home : str
        Device of leaves that are on none of the model's devices.
    homes : mapping of str to (RuntimeFunction, int)
        For each leaf a function with it as an argument, and the argument's number.

    Attributes
    ----------
    values : dict of str to array
    init : dict of str to numpy.ndarray
        Initial values other than zeros.
    """

    def __init__(self, where: str, home: str, homes: Mapping[str, tuple[RuntimeFunction, int]]) -> None:
        self.where, self._home, self.homes = where, home, homes
        self.values: dict[str, Any] = {}
        self.init: dict[str, np.ndarray] = {}
        self._lock = new_lock()
        self._lost: BaseException | None = None

    def reserve(self, where: str, replaces_values: bool = False) -> None:
        """Lock the state for a call; ``replaces_values`` means that the call does not read the old values.

        Raises
        ------
        CallError
            If another call is running, or the last call failed after it had started to overwrite the values.
        """
        if not self._lock.acquire(blocking=False):
            hint = "wait for it; a state for each sequence: module.state(...)"
            raise CallError(where, "another call with the same state is running", hint=hint)
        if replaces_values:
            self._lost = None
        if self._lost is not None:
            self._lock.release()
            first = str(self._lost).partition("\n")[0]
            what = f"the state is lost: a call that overwrites it failed ({type(self._lost).__name__}: {first})"
            raise CallError(where, what, hint="state.reset(), or state.load(path)")

    def finish_call(self, new_values: Mapping[str, Any], error: BaseException | None, overwrites: bool) -> None:
        """Finish a call: store its new values, or mark the state as lost if the call failed after overwriting."""
        if error is None:
            self.values |= new_values
        else:
            stopped = not isinstance(error, CallError) or isinstance(error, FenceCancelled | DeadlineExceeded)
            donated = any(isinstance(x, DeviceArray) and x.donated for x in self.values.values())
            self._lost = error if donated or (overwrites and stopped) else None
        self._lock.release()

    def value_or_initial(self, key: str, argument: Argument, where: str) -> Any:
        """Return the current value of a leaf, or before the first call its initial value, as ``argument`` expects."""
        found = self.values.get(key)
        if found is None:
            found = self.values[key] = self._initial_value(key, argument, where)
        return found

    def _initial_value(self, key: str, argument: Argument, where: str) -> Any:
        """Return a copy of a leaf's initial value on its device: the user's, or zeros if the shape is static."""
        given = self.init.get(key)
        if given is not None:
            return self.place_leaf(key, given.copy())
        if not argument.static:
            expected = f"state[{key!r}] = ..., or a call that gives it"
            what = f"the state has no {key} yet, and its size is not known: {argument}"
            raise CallError(where, what, expected=expected)
        return self.place_leaf(key, np.zeros([int(d) for d in argument.dims], argument.dtype))

    def place_leaf(self, key: str, array: np.ndarray) -> Any:
        """Convert the value of a leaf to an array on the device where its function reads it.

        A NumPy array on the host.
        """
        function, number = self.homes[key]
        found = place_argument(function, number, array, self._home)
        return found if found.ordinal >= 0 else found.numpy()

    def run_exclusively(self, work: Callable[[], Any], replaces_values: bool = False) -> Any:
        """Run ``work`` while no call uses the state; ``replaces_values`` means that ``work`` replaces all values."""
        self.reserve(self.where, replaces_values)
        try:
            return work()
        finally:
            self._lock.release()

    def copy_value(self, key: str) -> np.ndarray:
        """Return a copy of a leaf's current value, in host memory."""
        function, number = self.homes[key]
        found = self.value_or_initial(key, function.arguments[number], function.where)
        return found.numpy().copy() if isinstance(found, DeviceArray) else np.array(found)
