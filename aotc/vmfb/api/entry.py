"""A function of a loaded module, called with pytrees."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from aotc.vmfb import trees
from aotc.vmfb.api.parameters import Parameters
from aotc.vmfb.arguments import Signature
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.shutdown import refuse_if_ending
from aotc.vmfb.vm import LoadedFunction

if TYPE_CHECKING:
    from aotc.vmfb.api.submit_entry import Submitting
    from aotc.vmfb.submit.fence import Fence

_NOT_KNOWN = -2  # before the first call


class Again:
    """What stands for a module in a pickle: the module that another process loads, as it was loaded here."""

    def __init__(self, load: Callable[..., Any], path: str | None, asked: Sequence[Any]) -> None:
        self._load, self._path, self._asked = load, path, asked

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            what = "a module that was loaded from bytes cannot be pickled: another process has no file to load"
            raise TypeError(f"{what}; aotc.load(path)")
        return self._load, (os.path.abspath(self._path), self._asked)


class Entry:
    """A function of a module, as ``module.main``: call it with pytrees, look at its ``signature``."""

    _refuse_if_ending, _cleared = staticmethod(refuse_if_ending), ReferenceError

    def __init__(self, function: LoadedFunction, home: str) -> None:
        self._function, self._home = function, home
        self.signature: Signature = function.signature
        self.again: Again | None = None
        self._count, self._flat = _NOT_KNOWN, False
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = self.signature.doc or "A function of a module."  # ``help`` shows that of the class no function's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with what it was compiled with, by position or by name; return results as the function did."""
        try:
            arranged = self._arranged(args, kwargs) if kwargs or len(args) != self._count else args
            values = arranged if self._flat else self._leaves(arranged)
            return self._unflatten(iter(self._function.call(values)))
        except self._cleared:  # the weak reference that the fast path has to its function
            return self._unflatten(iter(self._function.run(values)))
        except:  # of every type: when the interpreter ends, names of types may be gone
            self._refuse_if_ending()
            raise

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the flat arrays of a call.

        Raises
        ------
        VmError
            Names the argument that is missing, unknown, or has another structure.
        """
        arranged = self._arranged(args, kwargs)
        return arranged if self._flat else self._leaves(arranged)

    def _arranged(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return what a call gives, in order; the first call learns which ones are in order already."""
        known = self._parameters
        self._flat, self._count = known.flat, known.quick
        return known.arranged(args, kwargs)

    def _leaves(self, args: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        try:
            self._flatten(args, values)
        except VmError:
            raise
        except Exception as error:  # it asks objects of the caller's own
            what = f"the arguments cannot be taken apart: {type(error).__name__}: {error}"
            raise VmError(self._function.where, what) from error
        return values

    def submit(self, *args: Any, **kwargs: Any) -> Fence:
        """Call it later; the fence's results are flat, :meth:`rebuild` makes of them what a call returns."""
        try:
            return self.options().submit(*args, **kwargs)
        except:  # as in a call
            self._refuse_if_ending()
            raise

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call it without holding up the event loop: ``await module.main.async_(x)``.

        A task that is cancelled cancels the call.
        """
        return await self.options().async_(*args, **kwargs)

    def options(
        self, *, deadline: float | None = None, wait: Sequence[Fence] = (), donate: bool = False, results: str = ""
    ) -> Submitting:
        """Return the function with options as of :meth:`aotc.vmfb.module.LoadedModule.submit`, to be called with trees.

        ``module.main.options(deadline=0.5)(x)`` ends with :class:`aotc.DeadlineExceeded` after half a second;
        ``.submit(x)`` and ``.async_(x)`` take the same.
        """
        from aotc.vmfb.api.submit_entry import Submitting  # for whoever submits

        return Submitting(self, self._function, self._home, (deadline, wait, donate, results))

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Return flat results as the function gave them when it was exported.

        Raises
        ------
        VmError
            If these are not as many as it has.
        """
        if type(results) is not list or len(results) != len(self.signature.results):  # what a call makes is a list
            self._check_count(results)
        return self._unflatten(iter(results))

    def _check_count(self, results: Any) -> None:
        count = len(self.signature.results)
        if not isinstance(results, Sequence) or len(results) != count:
            given = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise VmError(self._function.where, "wrong number of results", given, count)

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.signature, self._function.where)

    @cached_property
    def _flatten(self) -> trees.Flatten:
        return self._parameters.flattener()

    @cached_property
    def _unflatten(self) -> trees.Unflatten:
        tree = self.signature.out_tree
        if tree is not None:
            return trees.unflattener(tree)
        return next if len(self.signature.results) == 1 else list

    @property
    def __signature__(self) -> inspect.Signature:
        return self._parameters.signature()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.again, self.__name__)

    def __repr__(self) -> str:
        return repr(self.signature)
