"""Functions of a loaded module, called with pytrees."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from operator import getitem
from typing import TYPE_CHECKING, Any, NoReturn

from aotc.vmfb import trees
from aotc.vmfb.api.parameters import Parameters
from aotc.vmfb.arguments import Signature, TensorSpec
from aotc.vmfb.errors import ArgumentError, CallError, MissingFunctionError
from aotc.vmfb.host.shutdown import raise_if_interpreter_exiting
from aotc.vmfb.public_names import public_names

if TYPE_CHECKING:
    from aotc.vmfb.api.submit_entry import Submitting
    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.submit.fence import Fence

_NOT_KNOWN = -2  # before the first call


class PickledModule:
    """Pickled form of a module: path and options, with which unpickling loads the module again."""

    def __init__(self, load: Callable[..., Any], path: str | None, options: Sequence[Any]) -> None:
        self._load, self._path, self._asked = load, path, options

    def __reduce__(self) -> tuple[Any, ...]:
        if self._path is None:
            what = "a module that was loaded from bytes cannot be pickled: another process has no file to load"
            raise TypeError(f"{what}; aotc.load(path)")
        return self._load, (os.path.abspath(self._path), self._asked)


class ClosedModule:
    """Replaces the executable or a function of a closed module: any use raises an error."""

    def __init__(self, where: str) -> None:
        self.where = where

    def refuse(self) -> NoReturn:
        """Raise the error for a use of a closed module."""
        raise CallError(self.where, "the module was closed", hint="load the bundle again with aotc.load")

    def __getattr__(self, _: str) -> Any:
        self.refuse()


@public_names("async_", "options", "signature", "submit")
class Entry:
    """A function of a module, such as ``module.main``: call it with pytrees; ``signature`` describes it."""

    _refuse_if_ending, _cleared = staticmethod(raise_if_interpreter_exiting), ReferenceError

    def __init__(self, function: RuntimeFunction, home: str) -> None:
        self._function: RuntimeFunction | ClosedModule = function
        self._home = home
        self.signature: Signature = function.signature
        self.again: PickledModule | None = None
        self._count, self._flat = _NOT_KNOWN, False
        self.__name__ = self.__qualname__ = function.name
        self.__doc__ = self.signature.doc or "A function of a module."  # ``help`` ignores an instance's empty docstring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its original parameters, by position or by name; results have the original form."""
        try:
            ordered = self._order_arguments(args, kwargs) if kwargs or len(args) != self._count else args
            values = ordered if self._flat else self._flatten_ordered(ordered)
            return self._unflatten(iter(self._function.call(values)))
        except self._cleared:  # the fast path's weak reference to its function is dead
            return self._unflatten(iter(self._function.run(values)))
        except:  # bare: at interpreter exit the names of exception types may be gone
            self._refuse_if_ending()
            raise

    def close(self) -> None:
        """Close the function with its module: later calls fail."""
        self._function = ClosedModule(self._function.where)

    def flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the flat arrays of a call.

        Raises
        ------
        CallError
            Its message has the argument that is missing, unknown, or has another structure.
        """
        ordered = self._order_arguments(args, kwargs)
        return ordered if self._flat else self._flatten_ordered(ordered)

    def _order_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[Any]:
        """Return the arguments of a call in the compiled order; record which calls need no reordering."""
        known = self._parameters
        self._flat, self._count = known.flat, known.quick
        return known.order_arguments(args, kwargs)

    def _flatten_ordered(self, args: Sequence[Any]) -> list[Any]:
        """Return the leaves of arguments that are in the compiled order."""
        values: list[Any] = []
        try:
            self._flatten(args, values)
        except CallError:
            raise
        except Exception as error:  # it runs code of the caller's objects
            what = f"the arguments cannot be flattened: {type(error).__name__}: {error}"
            raise ArgumentError(self._function.where, what) from error
        return values

    def submit(self, *args: Any, **kwargs: Any) -> Fence:
        """Submit a call and return its fence; :meth:`~aotc.Fence.result` returns the pytree that a call returns."""
        try:
            return self.options().submit(*args, **kwargs)
        except:  # as in a call
            self._refuse_if_ending()
            raise

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function without blocking the event loop: ``await module.main.async_(x)``.

        Cancelling the task cancels the call.
        """
        return await self.options().async_(*args, **kwargs)

    def options(
        self, *, deadline: float | None = None, wait: Sequence[Fence] = (), donate: bool = False, results: str = ""
    ) -> Submitting:
        """Return the function with options of :meth:`aotc.vmfb.module.LoadedModule.submit`, to be called with pytrees.

        ``module.main.options(deadline=0.5)(x)`` raises :class:`aotc.DeadlineExceeded` after half a second;
        ``.submit(x)`` and ``.async_(x)`` have the same options.
        """
        from aotc.vmfb.api.submit_entry import Submitting  # only for submissions

        return Submitting(self, self._function, self._home, (deadline, wait, donate, results))

    def rebuild(self, results: Sequence[Any]) -> Any:
        """Build the result of a call, a pytree of the original function's structure, from its flat results.

        Raises
        ------
        CallError
            If the number of results is wrong.
        """
        if type(results) is not list or len(results) != len(self.signature.results):  # a call returns a list
            self._check_count(results)
        return self._unflatten(iter(results))

    def arguments_from_leaves(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Build the positional arguments of a call, pytrees, from their leaves.

        Raises
        ------
        CallError
            If the function takes arguments by keyword.
        """
        tree = self.signature.in_tree
        if tree is None:
            return tuple(leaves)
        args, kwargs = trees.make_unflattener(tree)(iter(leaves))
        if kwargs:
            raise CallError(self._function.where, f"arguments by keyword have no order: {', '.join(kwargs)}")
        return args

    def flatten_results(self, value: object) -> list[Any]:
        """Return the leaves of a pytree that a call has returned."""
        tree, found = self.signature.out_tree, list[Any]()
        if tree is None:
            return [value] if not isinstance(value, list) else value
        trees.make_flattener(tree, self._function.where, "result")(value, found)
        return found

    def _check_count(self, results: Any) -> None:
        count = len(self.signature.results)
        if not isinstance(results, Sequence) or len(results) != count:
            given = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise ArgumentError(self._function.where, "wrong number of results", given, count)

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
            return trees.make_unflattener(tree)
        return next if len(self.signature.results) == 1 else list

    @property
    def __signature__(self) -> inspect.Signature:
        return self._parameters.signature()

    def __reduce__(self) -> tuple[Any, ...]:
        return getitem, (self.again, self.__name__)

    def __repr__(self) -> str:
        return repr(self.signature)


class NamedFunctions:
    """Base class of objects with several functions by name, one of which is the default."""

    name: str
    functions: dict[str, Entry]

    def default_name(self) -> str:
        """Return the name of the function that a call of the module runs.

        Raises
        ------
        CallError
            If there are several, and none is ``main``.
        """
        name = "main" if "main" in self.functions or len(self.functions) != 1 else next(iter(self.functions))
        if name not in self.functions:
            raise CallError(self.name, "no default function 'main'", expected=", ".join(self.functions))
        return name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.functions[self.default_name()](*args, **kwargs)

    def __getitem__(self, name: str) -> Entry:
        """Return a function by name. This includes functions with the name of a method: ``module["state"]``.

        Raises
        ------
        MissingFunctionError
            If there is no such function; it is also a ``KeyError``.
        """
        if name in self.functions:
            return self.functions[name]
        raise MissingFunctionError(self.name, "there is no such function", repr(name), ", ".join(self.functions))

    @property
    def signature(self) -> Signature:
        """The signature of the default function."""
        return self.functions[self.default_name()].signature

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """The types of the default function's arguments."""
        return self.signature.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """The types of the default function's results."""
        return self.signature.outputs
