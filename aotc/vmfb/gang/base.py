"""A sharded model on ranks that this process drives: whole arrays in and out, states that stay on the ranks.

Subclasses start the ranks, and pass arrays to them.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from aotc.vmfb.api.buckets import bucketed_functions
from aotc.vmfb.api.entry import Entry, NamedFunctions
from aotc.vmfb.api.partial_signature import signature_without
from aotc.vmfb.arguments import Argument, Signature, type_text
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError, RankLost
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.public_names import public_names
from aotc.vmfb.ranks.cut import layout_and_shapes, whole_signature
from aotc.vmfb.ranks.layout import Layout, Mesh, layout_of, layout_text
from aotc.vmfb.weights.own import weight_places_of

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeFunction


@public_names(
    "close", "functions", "has_ended", "inputs", "invoke", "mesh", "name", "outputs", "processes", "signature",
)  # fmt: skip
class BaseGang(NamedFunctions, ABC):
    """Base of gangs: a sharded model whose ranks this process drives.

    Parameters
    ----------
    bundle : OpenedBundle
    mesh : Mesh
        The mesh of the bundle.
    has_weights : bool
        True if the ranks load the weights from a file: they are no arguments then.
    again : str
        Expression that starts another gang, for messages.

    Attributes
    ----------
    name : str
    mesh : Mesh
    functions : dict of str to Entry
    """

    def __init__(self, bundle: OpenedBundle, mesh: Mesh, has_weights: bool, again: str) -> None:
        self.name: str = bundle.manifest["name"]
        self.mesh = mesh
        self._again = again
        self._lock, self._end = new_lock(), ""
        self._numbers, self._dropped = count(), deque[int]()
        self._part_signatures = signatures_of_parts(bundle, has_weights)
        functions: dict[str, Any] = {n: GangFunction(self, own) for n, own in self._part_signatures.items()}
        functions = {**bucketed_functions(bundle.manifest["functions"], functions, self.name), **functions}
        self._functions = functions
        self.functions = {name: GangEntry(function) for name, function in functions.items()}

    # ------------------------------------------------------------ what a kind of ranks defines

    @property
    @abstractmethod
    def processes(self) -> tuple[int, ...]:
        """The process identifier of each rank."""

    @abstractmethod
    def _call_ranks(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a function of fixed sizes on whole arrays of the types of its signature; return whole results.

        The caller has the lock. An error of a rank ends the gang.
        """

    @abstractmethod
    def _step_ranks(self, name: str, array: np.ndarray, state: int, dropped: Sequence[int]) -> np.ndarray:
        """Run a function of fixed sizes on a whole array and a state; return the first result.

        The ranks free the states with the numbers ``dropped``. The caller has the lock. An error of a
        rank ends the gang.
        """

    @abstractmethod
    def _kill_ranks(self) -> None:
        """End the ranks while another thread waits for them, which has the lock."""

    @abstractmethod
    def _free_ranks(self) -> None:
        """End the ranks and free all resources. The caller has the lock."""

    def _prepare_ranks(self) -> None:
        """Refuse a call of a gang that has ended. The caller has the lock."""
        self._check_open()

    # ------------------------------------------------------------ calls

    def invoke(self, name: str, *arrays: Any) -> list[np.ndarray]:
        """Run a function on the flattened arguments, each whole (not sharded).

        Raises
        ------
        CallError
            If the bundle has no function ``name``, or an argument does not match the function's signature.
        RankLost
            If the process of a rank ended.
        """
        return self._function(name).call(arrays)

    def run(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a function of fixed sizes on whole arrays of the types of its signature; return whole results."""
        with self._lock:
            self._prepare_ranks()
            return self._call_ranks(name, arrays)

    def step(self, name: str, array: np.ndarray, state: GangState) -> np.ndarray:
        """Run a function on a whole array and on the state on the ranks; return the first result.

        The function takes the arrays of the state, if the state has any, behind the first argument. Its other results
        replace them. No rank sends its part of the state to another one or to this process.

        Raises
        ------
        CallError
            If the array does not fit, the state is another gang's, or a rank fails.
        RankLost
            If the process of a rank ended. The state is lost then.
        """
        if state.gang is not self:
            raise CallError(self.name, "the state is on the ranks of another gang", hint="begin with a new one")
        function = self._fixed_function(name, [array])
        value = function.whole_array(0, array)
        with self._lock:
            self._prepare_ranks()
            self._check_state(state)
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            return self._step_ranks(function.name, value, state.number, dropped)

    def new_state(self) -> GangState:
        """Return an empty state, for calls of :meth:`step`."""
        return GangState(self, next(self._numbers), self._dropped)

    def _check_state(self, state: GangState) -> None:
        """Refuse a state that the ranks do not have. The caller has the lock."""

    # ------------------------------------------------------------ functions

    def _fixed_function(self, name: str, arrays: Sequence[Any]) -> GangFunction:
        """Return a function, or the one of its buckets for the sizes of the arrays."""
        function = self._function(name)
        buckets = getattr(function, "buckets", None)
        return function if buckets is None else self._function(buckets.of_arguments(arrays))

    def fixed_signatures(self, name: str) -> list[Signature]:
        """Return the signature of a function, or of each of its buckets."""
        return [function.signature for function in self._fixed_functions(name)]

    def layouts(self, name: str) -> list[tuple[list[Layout], list[Layout]]]:
        """Return the layouts of arguments and of results of a function, or of each of its buckets."""
        found = []
        for function in self._fixed_functions(name):
            arguments, results = ([layout_and_shapes(row)[0] for row in rows] for rows in function.part_rows)
            found.append((arguments, results))
        return found

    def _fixed_functions(self, name: str) -> list[GangFunction]:
        buckets = getattr(self._function(name), "buckets", None)
        return [self._function(own) for own in ([name] if buckets is None else buckets.sizes)]

    def _function(self, name: str) -> Any:
        function = self._functions.get(name) if isinstance(name, str) else None
        if function is None:
            raise ArgumentValueError(self.name, f"no function {name!r}", expected=", ".join(self.functions) or "none")
        return function

    # ------------------------------------------------------------ the end

    @contextmanager
    def _end_on_error(self) -> Iterator[None]:
        """Record an exception as the end of the gang. The caller has the lock."""
        try:
            yield
        except BaseException as error:
            if self._end and isinstance(error, RankLost):
                self._check_open()
            self._end = self._end or f"its ranks were ended by {_shortened_error(error)}"
            raise

    @property
    def has_ended(self) -> bool:
        """True if the ranks have ended: closed, lost, or after an error in one of them."""
        return bool(self._end)

    def _check_open(self) -> None:
        if self._end:
            raise CallError(self.name, f"the gang has ended: {self._end}", hint=f"{self._again}, once more")

    def close(self) -> None:
        """End the processes; a call of another thread fails. Closing twice is allowed."""
        self._end = self._end or "it was closed"
        if not self._lock.acquire(blocking=False):
            self._kill_ranks()
            self._lock.acquire()
        try:
            self._free_ranks()
        finally:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        functions = self.__dict__.get("functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"gang {self.__dict__.get('name')!r} has no function {name!r}; it has {list(functions)}")

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a gang cannot be pickled: this process drives its ranks; {self._again}(path)")

    def __repr__(self) -> str:
        state = f" has ended: {self._end}" if self._end else f" on {self.mesh.size} ranks ({self.mesh})"
        return "\n".join([f"gang {self.name}{state}", *(f"  {entry!r}" for entry in self.functions.values())])


def signatures_of_parts(bundle: OpenedBundle, has_weights: bool) -> dict[str, Signature]:
    """Return the signature of each function of a rank, without weights that the ranks load from a file."""
    entries, variant = bundle.manifest["functions"], bundle.manifest["variants"][0]
    weights = weight_places_of(bundle.manifest, variant, bundle.where).functions if has_weights else {}
    signatures = {name: Signature(name, entries[name]) for name in variant["functions"]}
    return {
        name: signature_without(own, weights[name].values(), ()) if name in weights else own
        for name, own in signatures.items()
    }


def rank_keywords(
    threads: int | None, weights: object, verify: bool, trusted_keys: Sequence[str | os.PathLike[str] | bytes] | None,
    untrusted: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the keywords of :func:`aotc.load` for each rank, as plain data with absolute paths.

    Raises
    ------
    CallError
        If the weights are not a file.
    """
    return {
        "threads": threads, "verify": verify, "untrusted": untrusted,
        "trusted_keys": None if trusted_keys is None else [_key_text(key) for key in trusted_keys],
        "weights": _weights_argument(weights),
    }  # fmt: skip


def _key_text(key: str | os.PathLike[str] | bytes) -> str:
    if isinstance(key, bytes):
        return key.decode()
    return os.path.abspath(key) if os.path.exists(key) else os.fspath(key)


def _weights_argument(weights: object) -> str | None:
    if weights is None:
        return None
    if not isinstance(weights, str | os.PathLike):
        found = type(weights).__name__
        hint = "write the arrays to a safetensors file"
        raise ArgumentError("gang", "weights= of a gang is a file", found, hint=hint)
    return os.path.abspath(os.fspath(weights))


class GangState:
    """Arrays that stay on the ranks of a gang between calls, as a KV cache: each rank has its parts.

    The ranks free the arrays with the next step after this object is gone.

    Attributes
    ----------
    gang : BaseGang
    number : int
    """

    def __init__(self, gang: BaseGang, number: int, dropped: deque[int]) -> None:
        self.gang, self.number = gang, number
        weakref.finalize(self, dropped.append, number).atexit = False


class GangFunction:
    """A function of a gang on flat, whole arrays.

    Attributes
    ----------
    signature : Signature
        With the shapes of whole arrays.
    arguments : list of Argument
    part_rows : pair of sequences
        The entries of the arguments and of the results in the manifest, which are those of a rank's parts.
    """

    def __init__(self, owner: BaseGang, signature: Signature) -> None:
        self.name, self.where = signature.name, f"{owner.name}.{signature.name}"
        self.signature = whole_signature(signature)
        self.arguments = [Argument(n, row) for n, row in enumerate(self.signature.arguments)]
        self.part_rows = signature.arguments, signature.results
        self._owner = weakref.ref(owner)

    def call(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run a call; see :meth:`aotc.vmfb.vm.LoadedFunction.call`."""
        owner = self._owner()
        if owner is None:
            raise CallError(self.where, "the gang of this function does not exist any more", hint="start it again")
        return owner.run(self.name, self.whole_arrays(values))

    def whole_arrays(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Return arguments as whole arrays of the types of the signature.

        Raises
        ------
        CallError
            If an argument does not fit.
        """
        if len(values) != len(self.arguments):
            names = ", ".join(map(str, self.arguments))
            raise ArgumentError(self.where, "wrong number of arguments", len(values), f"{len(self.arguments)}: {names}")
        return [self.whole_array(n, value) for n, value in enumerate(values)]

    def run(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run a call."""
        return self.call(values)

    def whole_array(self, number: int, value: object) -> np.ndarray:
        """Return an argument as an array; refuse a part."""
        argument, row, shape = self.arguments[number], self.part_rows[0][number], getattr(value, "shape", None)
        if "whole" in row and shape != argument.dims and shape == tuple(row["dims"]):
            found, expected = (type_text(row["dtype"], dims) for dims in (shape, argument.dims))
            hint = f"the whole array: the gang cuts it by {layout_text(layout_of(row['layout']))}"
            raise ArgumentValueError(self.where, f"{argument.label} is one rank's part", found, expected, hint)
        found = argument.prepare(value, self.where)
        return found if isinstance(found, np.ndarray) else found.numpy()


class GangEntry(Entry):
    """A function of a gang, called with pytrees of whole arrays."""

    def __init__(self, function: GangFunction) -> None:
        super().__init__(cast("RuntimeFunction", function), "cpu:0")  # of its methods, calls need these alone

    def options(self, **_: object) -> NoReturn:
        """Refuse submissions: calls of a gang wait for their results.

        Raises
        ------
        CallError
        """
        raise CallError(self.__name__, "calls of a gang are not submitted", hint="call it, in a thread of your own")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a function of a gang cannot be pickled: this process drives the ranks")


def _shortened_error(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
