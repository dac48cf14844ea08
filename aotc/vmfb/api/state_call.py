"""Calls of a function with a state: the signature without the state's arguments and results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aotc.vmfb import trees
from aotc.vmfb.api.entry import ClosedModule
from aotc.vmfb.api.parameters import Parameters
from aotc.vmfb.api.partial import PartialFunction
from aotc.vmfb.api.partial_signature import signature_without
from aotc.vmfb.api.state_values import StateValues
from aotc.vmfb.arguments import Signature
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.result_names import is_leaf_of_pytree, name_of_next_argument, parse_state_pairs
from aotc.vmfb.results import DEVICE

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeFunction


def state_leaves(
    signature: Signature, names: Sequence[str], results: Mapping[str, str]
) -> tuple[dict[int, str], dict[int, str]]:
    """Return the state leaves that a function reads, by argument number, and those that it returns, by result number.

    ``names`` are the pytrees of the state; ``results`` maps results to the arguments that they become.
    """
    pairs = {**signature.state, **parse_state_pairs(results)}
    takes = {n: row["name"] for n, row in enumerate(signature.arguments)}
    arguments = set(takes.values())
    gives = {n: name_of_next_argument(row["name"], pairs, arguments) for n, row in enumerate(signature.results)}
    read, written = (
        {n: key for n, key in rows.items() if any(is_leaf_of_pytree(key, name) for name in names)}
        for rows in (takes, gives)
    )
    return read, written


class StateCall:
    """A function of a module, called without the arguments of a state; see :class:`aotc.vmfb.api.state.KeptState`.

    Attributes
    ----------
    signature : Signature
        The signature without the state.
    """

    def __init__(
        self, state_values: StateValues, function: RuntimeFunction, takes: Mapping[int, str], gives: Mapping[int, str]
    ) -> None:
        self._state, self._function = state_values, function
        self._takes, self._gives = dict(takes), dict(gives)
        self._open = [n for n in range(len(function.arguments)) if n not in takes]
        self.signature = signature_without(function.signature, takes, gives)
        self._parameters = Parameters(self.signature, function.where)
        self._flatten = self._parameters.flattener()
        self._rebuild = _make_result_rebuilder(self.signature)
        donated = [a.donated for a in function.arguments]
        self._overwrites = any(donated[n] for n in takes)
        self._copied = [(at, n) for at, n in enumerate(self._open) if donated[n]] if self._overwrites else []
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = function.signature.doc or repr(self.signature)

    def close(self) -> None:
        """Close the call with its module: later calls fail."""
        self._function = cast("RuntimeFunction", ClosedModule(self._function.where))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the open arguments.

        The state's arguments are its current values, which results replace.
        """
        leaves: list[Any] = []
        self._flatten(self._parameters.order_arguments(args, kwargs), leaves)
        with self._reserve_state() as new_values:
            results = self._run(leaves)
            new_values.update((key, results[n]) for n, key in self._gives.items())
        return self._results_outside_state(results)

    @contextmanager
    def _reserve_state(self) -> Iterator[dict[str, Any]]:
        """Reserve the state for the block; the block stores the new values of leaves in the yielded dict."""
        self._state.reserve(self._function.where)
        new_values: dict[str, Any] = {}
        error: BaseException | None = None
        try:
            yield new_values
        except BaseException as found:
            error = found
            raise
        finally:
            self._state.finish_call(new_values, error, self._overwrites)
            del error

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function without blocking the event loop; other calls of the state fail until the call has ended."""
        from aotc.vmfb.submit.call import SubmittedCall  # only for callers with event loops
        from aotc.vmfb.submit.submission import submit

        leaves: list[Any] = []
        self._flatten(self._parameters.order_arguments(args, kwargs), leaves)
        with self._reserve_state() as new_values:
            row = self._bind_state_values(leaves).complete_arguments(leaves)
            call = SubmittedCall(self._function, self._results_option(), "", wrapped=False)
            results = await submit(call, row, (), None, self._overwrites, None)
            new_values.update((key, results[n]) for n, key in self._gives.items())
        return self._results_outside_state(results)

    def _bind_state_values(self, leaves: list[Any]) -> PartialFunction:
        """Return the function with the state's values bound.

        Copy the ``leaves`` of the caller that the call would overwrite.
        """
        function = self._function
        row: list[Any] = [None] * len(function.arguments)
        for n, key in self._takes.items():
            row[n] = self._state.value_or_initial(key, function.arguments[n], function.where)
        for at, n in self._copied:  # donated like the state, but they belong to the caller
            leaves[at] = np.array(function.arguments[n].prepare(leaves[at], function.where))
        return PartialFunction(function, row, self._open)

    def _run(self, leaves: list[Any]) -> list[Any]:
        partial, results = self._bind_state_values(leaves), self._results_option()
        if not results and not self._overwrites:
            return partial.call(leaves)
        return partial.run(leaves, None, self._overwrites, results)

    def _results_option(self) -> str:
        """Return the option ``results`` of a call: ``device`` if the function computes results on a GPU."""
        return DEVICE if any(gpu >= 0 for gpu in self._function.residence.result_gpus) else ""

    def _results_outside_state(self, results: Sequence[Any]) -> Any:
        """Build the pytree of the results that are not part of the state.

        On a GPU only if the signature places them there.
        """
        named = self._function.residence.named
        own = [(x, named[n]) for n, x in enumerate(results) if n not in self._gives]
        return self._rebuild([x.numpy() if isinstance(x, DeviceArray) and not stays else x for x, stays in own])

    def __repr__(self) -> str:
        return f"<{self.signature!r} on a state of {self._state.where!r}>"


def _make_result_rebuilder(signature: Signature) -> Callable[[list[Any]], Any]:
    """Return a function that builds the result of a call from its leaves.

    A tuple or list of one item becomes the item.
    """
    tree = signature.out_tree
    if tree is None:
        return lambda results: results[0] if len(results) == 1 else results
    if tree["kind"] in ("tuple", "list") and len(tree["children"]) == 1:
        tree = tree["children"][0]
    unflatten = trees.make_unflattener(tree)
    return lambda results: unflatten(iter(results))
