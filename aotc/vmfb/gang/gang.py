"""A sharded model on this host: one child process for each rank, whole arrays in and out."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from aotc.vmfb.api.buckets import bucketed_functions
from aotc.vmfb.api.entry import Entry, NamedFunctions
from aotc.vmfb.api.partial_signature import signature_without
from aotc.vmfb.arguments import Argument, Signature, type_text
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import (
    ArgumentError,
    ArgumentValueError,
    BundleError,
    CallError,
    RankLost,
    bundle_errors,
)
from aotc.vmfb.gang.rank_processes import RankProcesses
from aotc.vmfb.gang.shared_arrays import SharedFunction, mapped_memory, memory_file
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.module import suggest_valid_keywords
from aotc.vmfb.public_names import public_names
from aotc.vmfb.ranks.cut import layout_and_shapes, whole_signature
from aotc.vmfb.ranks.layout import Layout, Mesh, layout_of, layout_text, mesh_of
from aotc.vmfb.weights.own import weight_places_of

if TYPE_CHECKING:
    from aotc.vmfb.gang.rank_recording import RankRecording
    from aotc.vmfb.interfaces import RuntimeFunction

Source = str | os.PathLike[str] | bytes | bytearray | memoryview

MOST_RANKS = 512  # processes of one host: a wrong number is an error before the host is filled with them


@suggest_valid_keywords
def gang(
    source: Source, *, ranks: int | None = None,
    threads: int | None = None, timeout: float = 30.0, weights: str | os.PathLike[str] | None = None,
    verify: bool = False, trusted_keys: Sequence[str | os.PathLike[str] | bytes] | None = None, untrusted: bool = False,
) -> Gang:  # fmt: skip
    """Run a sharded bundle on this host: ``with aotc.gang("model.vmfb") as module: y = module(x)``.

    One child process runs each rank of the bundle's mesh. Calls take and return whole arrays; each rank gets its parts
    in shared memory. Leaving the ``with`` block ends the processes, as the end of this process does.

    Parameters
    ----------
    source : str, path, bytes or buffer
        The bundle.
    ranks : int, optional
        Number of ranks that the bundle must be for; by default the number that it is for.
    threads : int, optional
        Threads of each rank; by default as ``AOTC_NUM_THREADS`` or ``OMP_NUM_THREADS`` say, else the cores of this
        process divided by the number of ranks.
    timeout : float
        Seconds to wait until all ranks have joined.
    weights : path, optional
        Replacement of the bundle's weights, as for :func:`aotc.load`: each rank loads this file.
    verify, trusted_keys, untrusted
        As for :func:`aotc.load`.

    Returns
    -------
    Gang
        It has the functions of the bundle, as a module has.

    Raises
    ------
    BundleError
        If it is not a bundle, is for one device, or is for another number of ranks.
    CallError
        If a rank cannot load it.
    RankLost
        If a process of a rank ended, at the start or in a call.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentValueError("gang", "timeout must be positive", repr(timeout), "seconds")
    with bundle_errors(source):
        bundle = open_bundle(source)
    mesh = _mesh_of_bundle(bundle, ranks)
    keywords = {
        "threads": _threads_per_rank(threads, mesh.size), "verify": verify, "untrusted": untrusted,
        "trusted_keys": None if trusted_keys is None else [_key_text(key) for key in trusted_keys],
        "weights": _weights_argument(weights),
    }  # fmt: skip
    return Gang(source, bundle, mesh, keywords, float(timeout))


def _mesh_of_bundle(bundle: OpenedBundle, ranks: int | None) -> Mesh:
    """Return the mesh of a bundle for ``ranks`` ranks."""
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise ArgumentValueError("gang", "ranks must be a positive integer", repr(ranks))
    entry = bundle.manifest.get("mesh")
    if entry is None:
        hint = "aotc.load; or compile it with shardings over a mesh"
        raise BundleError(bundle.where, "the bundle is for one device and takes no ranks", hint=hint)
    mesh = mesh_of(entry)
    if ranks not in (None, mesh.size):
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and there are {ranks}"
        raise BundleError(bundle.where, message, hint=f"ranks={mesh.size}, or compile it for a mesh of {ranks}")
    if mesh.size > MOST_RANKS:
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and a gang has at most {MOST_RANKS} on one host"
        raise BundleError(bundle.where, message, hint="mpirun, torchrun or srun on several hosts")
    return mesh


def _threads_per_rank(threads: int | None, size: int) -> int | None:
    if threads is not None or any(os.environ.get(name) for name in ("AOTC_NUM_THREADS", "OMP_NUM_THREADS")):
        return threads
    return max(1, usable_cores() // size)


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


@public_names(
    "close", "functions", "has_ended", "inputs", "invoke", "mesh", "name", "outputs", "processes", "rank_seconds",
    "signature",
)  # fmt: skip
class Gang(NamedFunctions):
    """A sharded model whose ranks are child processes; see :func:`gang`.

    Functions are attributes and items, as those of a module: ``module.decode``, ``module["decode"]``. They take and
    return whole NumPy arrays. Calls of several threads run one after another. An exception in a rank, or an interrupted
    call, ends the gang.

    Attributes
    ----------
    name : str
    mesh : Mesh
    functions : dict of str to Entry
    rank_seconds : tuple of float
        The time of the last call on each rank.
    """

    def __init__(
        self, source: Source, bundle: OpenedBundle, mesh: Mesh, keywords: Mapping[str, Any], timeout: float
    ) -> None:
        self.name: str = bundle.manifest["name"]
        self.mesh = mesh
        self.rank_seconds: tuple[float, ...] = ()
        self._lock, self._end = new_lock(), ""
        self._numbers, self._dropped = count(), deque[int]()
        signatures = {name: Signature(name, entry) for name, entry in bundle.manifest["functions"].items()}
        variant = bundle.manifest["variants"][0]
        given = weight_places_of(bundle.manifest, variant, bundle.where).functions if keywords["weights"] else {}
        signatures = {
            name: signature_without(signatures[name], given[name].values(), ()) if name in given else signatures[name]
            for name in variant["functions"]
        }
        parts = {name: SharedFunction(mesh, signature) for name, signature in signatures.items()}
        file = memory_file(max((shared.size for shared in parts.values()), default=0))
        try:
            self._memory = mapped_memory(file)
            with _bundle_path_for_children(source) as (path, files), _free_address() as address:
                self._processes = RankProcesses(mesh.size, file, files)
                self._finalizer = weakref.finalize(self, self._processes.close)
                asked = {"path": path, "keywords": dict(keywords)}
                ranks = [(rank, mesh.size, address, "tcp", timeout) for rank in range(mesh.size)]
                replies = self._processes.ask([{**asked, "ranks": row} for row in ranks], "while the gang started")
        finally:
            os.close(file)
        functions: dict[str, Any] = {name: GangFunction(self, signatures[name], parts[name]) for name in parts}
        functions = {**bucketed_functions(bundle.manifest["functions"], functions, self.name), **functions}
        self._functions = functions
        self.functions = {name: GangEntry(function) for name, function in functions.items()}
        if replies[0]["signatures"] != {name: repr(signature) for name, signature in signatures.items()}:
            self.close()
            raise BundleError(bundle.where, "the file was replaced while the ranks loaded it", hint="aotc.gang again")

    @property
    def processes(self) -> tuple[int, ...]:
        """The process identifier of each rank."""
        return self._processes.identifiers

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

    def _fixed_function(self, name: str, arrays: Sequence[Any]) -> GangFunction:
        """Return a function, or the one of its buckets for the sizes of the arrays."""
        function = self._function(name)
        buckets = getattr(function, "buckets", None)
        return function if buckets is None else self._function(buckets.of_arguments(arrays))

    def fixed_signatures(self, name: str) -> list[Signature]:
        """Return the signature of a function, or of each of its buckets."""
        return [function.signature for function in self._fixed_functions(name)]

    def layouts(self, name: str) -> list[tuple[list[Layout], list[Layout]]]:
        """Return how the arguments and the results of a function, or of each of its buckets, are cut."""
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

    def run(self, name: str, shared: SharedFunction, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a function on whole arrays of the types of its signature; return whole results."""
        self._processes.refuse_in_fork()
        with self._lock:
            self._check_open()
            shared.write(self._memory, arrays)
            replies = self._ask([{"call": name}] * self.mesh.size, f"during a call of {name}")
            self.rank_seconds = tuple(reply["seconds"] for reply in replies)
            return shared.read(self._memory)

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
        self._processes.refuse_in_fork()
        with self._lock:
            self._check_open()
            function.shared.write(self._memory, [value])
            dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
            row = {"step": function.name, "state": state.number, "dropped": dropped}
            self._ask([row] * self.mesh.size, f"during a call of {name}")
            (first,) = function.shared.read(self._memory, 1)
            return first

    def new_state(self) -> GangState:
        """Return an empty state, for calls of :meth:`step`."""
        return GangState(self, next(self._numbers), self._dropped)

    def record(self, name: str, arrays: Sequence[Any], calls: int) -> list[RankRecording]:
        """Record ``calls`` calls of a function on each rank.

        ``arrays`` are the flattened arguments, each whole (not sharded).

        Raises
        ------
        CallError
            As for :meth:`invoke`, and if the bundle has no debug information.
        """
        from aotc.vmfb.gang.rank_recording import recording_of_data  # only for profiles

        function = self._fixed_function(name, arrays)
        whole = function.whole_arrays(arrays)
        self._processes.refuse_in_fork()
        with self._lock, TemporaryDirectory(prefix="aotc-profile-") as folder:
            self._check_open()
            function.shared.write(self._memory, whole)
            files = [os.path.join(folder, f"{rank}.json") for rank in range(self.mesh.size)]
            rows = [{"record": function.name, "calls": calls, "file": file} for file in files]
            self._ask(rows, f"during a recording of {name}")
            return [recording_of_data(json.loads(Path(file).read_bytes())) for file in files]

    def _ask(self, messages: Sequence[Mapping[str, Any]], during: str) -> list[dict[str, Any]]:
        """Return the reply of each rank; an exception ends the gang. The lock must be held."""
        try:
            return self._processes.ask(messages, during)
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
            raise CallError(self.name, f"the gang has ended: {self._end}", hint="aotc.gang, once more")

    def close(self) -> None:
        """End the processes; a call of another thread fails. Closing twice is allowed."""
        self._end = self._end or "it was closed"
        if not self._lock.acquire(blocking=False):
            self._processes.end_call()
            self._lock.acquire()
        try:
            self._finalizer()
        finally:
            self._lock.release()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        functions = self.__dict__.get("functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"gang {self.__dict__.get('name')!r} has no function {name!r}; it has {list(functions)}")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang cannot be pickled: its ranks are children of this process; aotc.gang(path)")

    def __repr__(self) -> str:
        state = f" has ended: {self._end}" if self._end else f" on {self.mesh.size} ranks ({self.mesh})"
        return "\n".join([f"gang {self.name}{state}", *(f"  {entry!r}" for entry in self.functions.values())])


class GangState:
    """Arrays that stay on the ranks of a gang between calls, as a KV cache: each rank has its parts.

    The ranks free the arrays with the next step after this object is gone.

    Attributes
    ----------
    gang : Gang
    number : int
    """

    def __init__(self, gang: Gang, number: int, dropped: deque[int]) -> None:
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
    shared : SharedFunction
    """

    def __init__(self, owner: Gang, signature: Signature, shared: SharedFunction) -> None:
        self.name, self.where = signature.name, f"{owner.name}.{signature.name}"
        self.signature = whole_signature(signature)
        self.arguments = [Argument(n, row) for n, row in enumerate(self.signature.arguments)]
        self.part_rows, self.shared = (signature.arguments, signature.results), shared
        self._owner = weakref.ref(owner)

    def call(self, values: Sequence[Any]) -> list[np.ndarray]:
        """Run a call; see :meth:`aotc.vmfb.vm.LoadedFunction.call`."""
        owner = self._owner()
        if owner is None:
            raise CallError(self.where, "the gang of this function does not exist any more", hint="aotc.gang")
        return owner.run(self.name, self.shared, self.whole_arrays(values))

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
        raise TypeError("a gang cannot be pickled: its ranks are children of this process; aotc.gang(path)")


def _shortened_error(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"


@contextmanager
def _bundle_path_for_children(source: Source) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return a path of the bundle for child processes, and the descriptors that they need for it."""
    if isinstance(source, str | os.PathLike):
        yield os.path.abspath(source), ()
        return
    data = memoryview(source).cast("B")
    file = memory_file(len(data))
    try:
        with mapped_memory(file) as memory:
            memory[: len(data)] = data
        os.ftruncate(file, len(data))
        yield f"/dev/fd/{file}", (file,)
    finally:
        os.close(file)


@contextmanager
def _free_address() -> Iterator[str]:
    """Return an address of the loopback interface that no other process gets meanwhile.

    The port stays bound here, without listening: rank 0, which also sets SO_REUSEADDR, may listen at it.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"
