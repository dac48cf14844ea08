"""A function of a loaded module, called with pytrees."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from aotc.vmfb import trees
from aotc.vmfb.arguments import Signature
from aotc.vmfb.errors import VmError
from aotc.vmfb.vm import LoadedFunction


class Entry:
    """A function of a module, as ``module.main``: call it with pytrees, look at its ``signature``."""

    def __init__(self, function: LoadedFunction) -> None:
        self._function = function
        self.signature: Signature = function.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values: list[Any] = []
        try:
            self._flatten((args, kwargs), values)
        except VmError:
            raise
        except Exception as error:  # it asks objects of the caller's own
            what = f"the arguments cannot be taken apart: {type(error).__name__}: {error}"
            raise VmError(self._function.where, what) from error
        return self._unflatten(iter(self._function.call(values)))

    def rebuild(self, results: list[Any]) -> Any:
        """Return flat results as the function gave them when it was exported."""
        return self._unflatten(iter(results))

    @cached_property
    def _flatten(self) -> trees.Flatten:
        tree = self.signature.in_tree
        where = self._function.where
        return _positional(self.signature, where) if tree is None else trees.flattener(tree, where)

    @cached_property
    def _unflatten(self) -> trees.Unflatten:
        tree = self.signature.out_tree
        if tree is not None:
            return trees.unflattener(tree)
        return next if len(self.signature.results) == 1 else list

    def __repr__(self) -> str:
        return repr(self.signature)


def _positional(signature: Signature, where: str) -> trees.Flatten:
    """Return what puts the arguments of a call in their order by their names."""

    def flatten(call: tuple[tuple[Any, ...], dict[str, Any]], leaves: list[Any]) -> None:
        args, kwargs = call
        leaves += args
        if kwargs:
            names = [argument["name"] for argument in signature.arguments[len(args) :]]
            if sorted(names) != sorted(kwargs):
                raise VmError(where, "wrong keyword arguments", ", ".join(kwargs), ", ".join(names))
            leaves += [kwargs[name] for name in names]

    return flatten
