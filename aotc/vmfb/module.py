"""Loaded bundles: ``aotc.load`` and the module that it returns."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from time import perf_counter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload
from weakref import WeakSet

import numpy as np

from aotc.vmfb.api.entry import ClosedModule, Entry, PickledModule
from aotc.vmfb.api.module_ranks import RankedModule
from aotc.vmfb.api.module_state import ModuleState
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.device import bind_devices, choose_variant, default_gpu, default_mixed_devices
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError, bundle_errors, check_keywords
from aotc.vmfb.host.logical_devices import place_on_logical_devices
from aotc.vmfb.host.shutdown import raise_if_interpreter_exiting
from aotc.vmfb.log import INFO, log
from aotc.vmfb.manifest import signatures_and_programs
from aotc.vmfb.public_names import public_names
from aotc.vmfb.results import DEVICE, NUMPY, wrap_host_results
from aotc.vmfb.verify.program import check_functions
from aotc.vmfb.vm import LoadedFunction
from aotc.vmfb.weights.constants import verify_external

if TYPE_CHECKING:
    from aotc.vmfb.api.weighted import OwnWeights
    from aotc.vmfb.call_limits import Limits
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.interfaces import Executable, RuntimeFunction
    from aotc.vmfb.profile.recording import CallRecording
    from aotc.vmfb.ranks.link import Link
    from aotc.vmfb.ranks.member import Member
    from aotc.vmfb.ranks.ranks import Ranks
    from aotc.vmfb.submit.call import SubmittedCall
    from aotc.vmfb.submit.fence import Fence

_RESULTS = (NUMPY, DEVICE)


Parameters = ParamSpec("Parameters")
Loaded = TypeVar("Loaded")


def suggest_valid_keywords(function: Callable[Parameters, Loaded]) -> Callable[Parameters, Loaded]:
    """Decorate a function: an unknown keyword argument raises an error that suggests the nearest valid one."""
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @wraps(function)
    def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Loaded:
        check_keywords(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return checked


@suggest_valid_keywords
def load(
    source: str | os.PathLike[str] | bytes | bytearray | memoryview | OpenedBundle, *,
    devices: str | Sequence[str] | Mapping[str, str] | None = None, threads: int | None = None, verify: bool = False,
    custom_calls: Mapping[str, Callable[..., Any]] | None = None, copy: bool = False,
    trusted_keys: Sequence[str | os.PathLike[str] | bytes] | None = None, untrusted: bool = False,
    memory_limit: int | str | None = None, max_in_flight: int | None = None, timeout: float | None = None,
    weights: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    warm: bool | Mapping[str, int] | Sequence[Mapping[str, int]] = False, ranks: Ranks | Link | None = None,
) -> LoadedModule:  # fmt: skip
    """Load a bundle.

    Parameters
    ----------
    source : str, path, bytes, buffer or OpenedBundle
        The large weights of a file are memory-mapped, all other data is copied; an opened bundle is loaded as it is.
    devices : str, sequence of str, or mapping of str to str, optional
        ``"cpu"``, ``"cuda:0"``...; by default a GPU if the bundle has code for this machine's, else the CPU. For a
        model that names devices, ``{"d0": "cpu:0"}`` or places in their order; by default the next one of each kind.
    threads : int, optional
        Threads with the caller's; by default ``AOTC_NUM_THREADS``, else ``OMP_NUM_THREADS``, else the cores.
    verify : bool
        Also verify the sha256 of large weights, and make the checks of the first call now.
    custom_calls : mapping of str to callable, optional
        Python functions, by name, for custom calls that are not in the bundle; see :func:`aotc.register_custom_call`.
    copy : bool
        Read files instead of mapping them: for files that may be overwritten in place, or on disks that may be removed.
    trusted_keys : sequence, optional
        Public keys: paths of files from ``aotc sign --new-key`` or openssl, their contents, or 64 hexadecimal digits.
        One of them must have signed the bundle; everything is verified before any code runs. Needs ``aotc[sign]``.
    untrusted : bool
        Never run code of the bundle that none of ``trusted_keys`` has signed: its source is compiled here instead, and
        must have the functions that the bundle declares. Needs ``aotc[compile]``.
    memory_limit : int or str, optional
        Bytes (or ``"64MB"``) of working memory of concurrent calls per device; others wait (``docs/memory.md``).
    max_in_flight : int, optional
        Maximum number of concurrent calls; others wait (``docs/async_calls.md``).
    timeout : float, optional
        Seconds after which a call, also a waiting one, ends with :class:`aotc.DeadlineExceeded`.
    weights : path or mapping, optional
        Replacement of the bundle's weights: a safetensors file, or arrays by their paths (``docs/weights.md``).
    warm : bool, mapping or sequence of mapping
        Call each function with zeros now, so that the first call is as fast as later ones: True for functions without
        symbolic dims, else their sizes: ``[{"b": 1}, {"b": 8}]``.
    ranks : Ranks, optional
        Which rank of a sharded bundle this process is; by default as its launcher says (``docs/sharding.md``).

    Raises
    ------
    BundleError, CallError
        If it is not a bundle, damaged, not signed as required, or cannot run here; if a keyword has no valid value.
    """
    with bundle_errors(source):
        calls, limits = _check_custom_calls(custom_calls), _validate_limits(max_in_flight, timeout)
        bundle, signed = _select_trusted_code(open_bundle(source, copy), devices, trusted_keys, untrusted)
        module = _load_bundle(bundle, devices, threads, verify or signed, calls, memory_limit, limits, weights, ranks)
    options = (devices, threads, verify, custom_calls, copy, trusted_keys, untrusted, memory_limit)
    module.again = PickledModule(_unpickle, bundle.path, (*options, max_in_flight, timeout, weights))
    if warm:
        _warm_up(module, warm)
    return module.remember_loading_options()


def _warm_up(module: LoadedModule, warm: bool | Mapping[str, int] | Sequence[Mapping[str, int]]) -> None:
    from aotc.vmfb.api.warm_up import warm_up  # only for modules that are warmed up

    warm_up(module, warm)


def _unpickle(path: str, options: Sequence[Any]) -> LoadedModule:
    """Unpickle a module: load the bundle at ``path`` with the options of the pickled module."""
    names = ("devices", "threads", "verify", "custom_calls", "copy", "trusted_keys", "untrusted", "memory_limit")
    return load(path, **dict(zip((*names, "max_in_flight", "timeout", "weights"), options)))


def _select_trusted_code(bundle: OpenedBundle, devices: Any, keys: Any, untrusted: bool) -> tuple[OpenedBundle, bool]:
    """Return the bundle whose code may run, and True if a trusted key's signature of it was verified.

    With ``untrusted``, that is a bundle compiled here from the source of ``bundle``.
    """
    if keys is None and not untrusted:
        return bundle, False
    from aotc.vmfb.verify.trust import select_trusted_bundle  # only with ``trusted_keys`` or ``untrusted``

    return select_trusted_bundle(bundle, devices, keys, untrusted)


def _check_custom_calls(calls: Any) -> Mapping[str, Callable[..., Any]]:
    if calls is not None and not (isinstance(calls, Mapping) and all(callable(f) for f in calls.values())):
        raise ArgumentError("", "custom_calls are not functions", repr(calls), "{'name': function}")
    return calls or {}


def _validate_limits(max_in_flight: int | None, timeout: float | None) -> Limits | None:
    if max_in_flight is None and timeout is None:
        return None
    from aotc.vmfb.call_limits import validate_limits  # only for modules with limits

    return validate_limits(max_in_flight, timeout)


def _load_bundle(
    bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None, threads: int | None, verify: bool,
    custom_calls: Mapping[str, Callable[..., Any]], memory_limit: int | str | None, limits: Limits | None, weights: Any,
    ranks: Ranks | Link | None,
) -> LoadedModule:  # fmt: skip
    """Verify an opened bundle, select a variant and devices, and load its code and weights."""
    start = perf_counter()
    if verify:
        bundle.verify_all()
    check_functions(bundle)
    variant, device, ordinal = choose_variant(bundle, devices)
    if verify:
        verify_external(bundle, variant.get("constants"))
    bound = bind_devices(bundle, variant, devices)
    where = bound or default_mixed_devices(variant, ordinal) if "spaces" in variant else ordinal
    member = None
    if "mesh" in bundle.manifest or ranks is not None:
        from aotc.vmfb.ranks.member import join_ranks  # only for bundles of several ranks

        member = join_ranks(bundle, variant, ranks)
        custom_calls = custom_calls if member is None else {**custom_calls, **member.functions}
        if member is not None and variant["kind"] == "cuda" and devices in (None, "cuda"):
            ordinal = default_gpu(member.local_rank)
            where = default_mixed_devices(variant, ordinal) if "spaces" in variant else ordinal
    try:
        executable = device.open_executable(bundle, variant, threads, where, custom_calls)
        home = f"{variant['kind']}:{ordinal}"
        module = _create_module(bundle, variant, executable, bound, home, member, memory_limit, limits, weights, verify)
    except BaseException as error:
        if member is not None:
            member.fail(error)
        raise
    took = 1e3 * (perf_counter() - start)
    log(INFO, "%s: loaded for %s, target %s, in %.1f ms", bundle.where, module.home, variant["target"], took)
    return module


def _create_module(
    bundle: OpenedBundle, variant: dict[str, Any], executable: Executable, bound: dict[str, str], home: str,
    member: Member | None, memory_limit: int | str | None, limits: Limits | None, weights: object, verify: bool,
) -> LoadedModule:  # fmt: skip
    """Create the module of a loaded variant; apply memory limit, call limits and weights."""
    if memory_limit is not None:
        from aotc.vmfb.host.byte_sizes import limit_memory  # only for modules with a limit

        limit_memory(executable, memory_limit, bundle.where)
    if limits is not None:
        executable.limits = limits
    module = LoadedModule(bundle, variant, executable, bound, home, member)
    if verify:
        module.check_ahead()
    if weights is not None or bundle.manifest.get("weights"):
        from aotc.vmfb.api.weighted import bind_module_weights  # only for bundles with such weights

        module._use_weights(bind_module_weights(module, bundle, variant, weights, verify))
    return module


@public_names(
    "async_", "bind", "close", "devices", "functions", "gather", "home", "inputs", "invoke", "mesh", "name", "outputs",
    "profile", "put", "rank", "shard", "signature", "state", "stats", "submit", "target", "trim", "update_weights",
    "weights",
)  # fmt: skip
class LoadedModule(ModuleState, RankedModule):
    """A loaded bundle; its functions are attributes, and items: ``module.decode``, ``module["decode"]``.

    ``module(*args, **kwargs)`` runs the default function (``main``, or the only one) with pytrees and keyword names as
    exported. All methods may be called from several threads at the same time. ``with aotc.load(path) as module`` closes
    it at the end.

    Attributes
    ----------
    name : str
    functions : dict of str to Entry
    devices : dict of str to str
        The device of this machine for each device that the model names.
    home : str
        The device of values that are on none of the model's devices, such as ``cuda:0``.
    """

    _refuse_if_ending = staticmethod(raise_if_interpreter_exiting)

    def __init__(
        self, bundle: OpenedBundle, variant: dict[str, Any], executable: Executable, devices: dict[str, str], home: str,
        member: Member | None = None,
    ) -> None:  # fmt: skip
        self.name: str = bundle.manifest["name"]
        self.devices = dict(devices)
        self.home = home
        self._bundle: OpenedBundle | ClosedModule = bundle
        self._executable: Executable | ClosedModule = executable
        place_on_logical_devices(executable, self.devices.values() or [home])
        self._functions: dict[str, RuntimeFunction] = {
            name: LoadedFunction(name, entry, program, executable, self.name)
            for name, (entry, program) in signatures_and_programs(bundle.manifest, variant).items()
        }
        limits = getattr(executable, "limits", None)
        if limits is not None:
            from aotc.vmfb.api.limited_function import LimitedFunction

            self._functions = {name: LimitedFunction(f, limits) for name, f in self._functions.items()}
        self._member = member
        if member is not None:
            from aotc.vmfb.api.rank_function import RankFunction

            self._functions = {name: RankFunction(f, member) for name, f in self._functions.items()}
        self.prepared: dict[str, Any] = variant.get("prepared", {})
        self.own_weights: OwnWeights | None = None
        self.again = PickledModule(_unpickle, None, ())
        self.dependents: WeakSet[Any] = WeakSet()  # bound functions and states, which are closed with the module
        self._submitted: dict[tuple[str, str], tuple[Callable[..., Fence], SubmittedCall]] = {}
        self.functions = {name: Entry(self._functions[name], home) for name in variant["functions"]}
        self._add_buckets(bundle)

    def invoke(
        self,
        name: str,
        *arrays: Any,
        out: Sequence[Any] | None = None,
        donate: bool = False,
        trace: str | os.PathLike[str] = "",
        results: str = "",
    ) -> list[Any]:
        """Run a function on flat arrays.

        Parameters
        ----------
        name : str
        *arrays
            One for each argument of the signature: NumPy arrays, objects with ``__array__`` or ``__dlpack__`` (not
            copied), Python scalars; a :class:`aotc.DeviceArray`, or a GPU array of another library, which is not copied
            if it is in the memory of the GPU that reads it.
        out : sequence of arrays or None, optional
            Buffer for each result, which is then this array: a NumPy array, or one on the GPU that computes the result.
        donate : bool
            Allow donated arguments to be overwritten (a device array is then unusable); otherwise they are copied.
        trace : path, optional
            Run one dispatch at a time and write the arrays that each reads and writes to a file ``NUMBER_KERNEL.npz``
            in this folder. Slow.
        results : str
            ``"numpy"``, or ``"device"``: arrays with a device, which stay on it. By default, only results that the
            signature places on a GPU device are device arrays.

        Returns
        -------
        list of numpy.ndarray or of DeviceArray

        Raises
        ------
        CallError
            If there is no such function, an argument does not fit, or an assertion of the program fails.
        """
        try:
            function = self._functions.get(name) if isinstance(name, str) else None
            if function is None or donate is not False or results:
                function = self._checked_function(name, donate, results)
            if results == DEVICE and not trace:
                made = function.run(arrays, out, donate, results)
                return wrap_host_results(made, function.signature.results, out, self.home)
            if trace:
                if out is not None or donate or len(arrays) != len(function.arguments):
                    raise CallError(self.name, "a traced call needs all arguments, and accepts neither out nor donate")
                if not isinstance(trace, str | os.PathLike):
                    raise ArgumentError(self.name, "trace is not a folder", repr(trace), "a path")
                return function.trace(arrays, os.fspath(trace))
            if out is None and not donate and not results:
                try:
                    return function.call(arrays)
                except ReferenceError:  # the collector clears weak references before it runs a finalizer that calls
                    pass
            return function.run(arrays, out, donate, results)
        except:  # bare: at interpreter exit the names of exception types may be gone
            self._refuse_if_ending()
            raise

    def submit(
        self,
        name: Any,
        *arrays: Any,
        wait: Sequence[Fence] = (),
        deadline: float | None = None,
        out: Sequence[Any] | None = None,
        donate: bool = False,
        results: str = "",
    ) -> Fence:
        """Submit a call of a function on flat arrays, and return at once; see ``docs/async_calls.md``.

        ``module.submit(x)``, whose first argument is not a name, submits the default function with pytrees, as
        ``module.main.submit(x)`` does: its fence's :meth:`~aotc.Fence.result` has the structure that a call returns.

        Parameters
        ----------
        name : str
        *arrays
            As for :meth:`invoke`; also results of fences (``fence[0]``, or a fence with a single result), which need
            not exist yet. Arrays are read when the call runs: they must not change until then.
        wait : list of Fence
            The call starts when all of these fences, and those of its arguments, are done; it fails if one of them
            fails.
        deadline : float, optional
            Seconds from now after which an incomplete call ends, and its fence fails with
            :class:`~aotc.DeadlineExceeded`.
        out, donate, results
            As for :meth:`invoke`.

        Returns
        -------
        Fence

        Raises
        ------
        CallError
            For errors that are already known: as for :meth:`invoke`; a fence of another process, or a failed one; an
            array that was passed to another submission with ``donate=True``; a negative deadline.
        """
        try:
            if not isinstance(name, str) and out is None:
                entry = self.functions[self.default_name()]
                options = entry.options(deadline=deadline, wait=wait, donate=donate, results=results)
                return options.submit(name, *arrays)
            function = self._checked_function(name, donate, results)
            found = self._submitted.get((name, results))
            if found is None:
                from aotc.vmfb.submit.call import SubmittedCall  # only for submissions
                from aotc.vmfb.submit.submission import submit

                found = self._submitted[name, results] = submit, SubmittedCall(function, results, self.home)
            return found[0](found[1], arrays, wait, deadline, bool(donate), out)
        except:  # as in a call
            self._refuse_if_ending()
            raise

    @property
    def every_function(self) -> dict[str, RuntimeFunction]:
        """All functions by name, including the internal programs for bound arguments."""
        return self._functions

    @property
    def gpus(self) -> Sequence[LoadedGpu]:
        """Return the kernels and constants that are loaded on each GPU."""
        return getattr(self._executable, "gpus", ())

    def _use_weights(self, own: OwnWeights) -> None:
        """Replace functions by those whose weights are bound."""
        self.own_weights, self.prepared = own, {}
        self._functions = {**self._functions, **own.functions}
        self.functions.update((name, Entry(function, self.home)) for name, function in own.functions.items())
        if not isinstance(self._bundle, ClosedModule):
            self._add_buckets(self._bundle)

    def _add_buckets(self, bundle: OpenedBundle) -> None:
        """Add a function for all sizes to those that the bundle has for each size."""
        if any("bucket" in entry for entry in bundle.manifest["functions"].values()):
            from aotc.vmfb.api.buckets import bucketed_functions  # only for sharded modules of several sizes

            found = bucketed_functions(bundle.manifest["functions"], self._functions, self.name)
            self._functions = {**self._functions, **found}
            self.functions = {**{name: Entry(f, self.home) for name, f in found.items()}, **self.functions}
            self.functions.update((name, Entry(f, self.home)) for name, f in found.items())

    def get_function(self, name: str) -> RuntimeFunction:
        """Return a function by name; raise CallError if it does not exist."""
        return self._checked_function(name, False, "")

    def _checked_function(self, name: str, donate: Any, results: Any) -> RuntimeFunction:
        """Return the function ``name``, after checks of the options ``donate`` and ``results`` of its call."""
        function = self._functions.get(name) if isinstance(name, str) else None
        if isinstance(self._executable, ClosedModule):
            self._executable.refuse()
        if function is None:
            raise ArgumentValueError(self.name, f"no function {name!r}", expected=", ".join(self.functions) or "none")
        if not isinstance(donate, bool | np.bool_ | int):
            raise ArgumentError(self.name, "donate is not True or False", type(donate).__name__, "True or False")
        if results and results not in _RESULTS:
            raise ArgumentValueError(self.name, f"results is {results!r}", expected=" or ".join(map(repr, _RESULTS)))
        return function

    @overload
    def profile(self) -> CallRecording: ...

    @overload
    def profile(self, name: str, *arrays: Any, repeat: int = 7) -> dict[str, Any]: ...

    def profile(self, name: str = "", *arrays: Any, repeat: int = 7) -> CallRecording | dict[str, Any]:
        """Record kernel times: ``with module.profile() as recording`` records each dispatch of the calls inside.

        With a name and arrays, the function runs once and each kernel ``repeat`` times in isolation, on a core or a
        whole GPU; this returns a record for ``aotc.compile(..., costs=record)`` (``docs/costs.md``).

        Raises
        ------
        CallError
            As in :meth:`invoke`; also if the bundle has no debug information.
        """
        from aotc.vmfb.profile.profile import profile  # not needed by a process that only runs a bundle
        return profile(self, self._executable, name, arrays, repeat)

    def remember_loading_options(self) -> LoadedModule:
        """Store the path and the options of :func:`load` in the module's functions, for pickling; return the module."""
        for function in self.functions.values():
            function.again = self.again
        return self

    def __reduce__(self) -> Any:
        return self.again.__reduce__()

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call the default function without blocking the event loop; cancelling the task cancels the call."""
        return await self.functions[self.default_name()].async_(*args, **kwargs)

    @property
    def target(self) -> str:
        """The target whose code runs, such as ``cpu:x86-64-v4``."""
        found: str = self._executable.stats()["target"]
        return found

    def close(self) -> None:
        """Let later calls fail, and free working memory that no running call uses. Closing twice is allowed.

        Bound functions and states of the module fail, too. Code and weights are freed when running calls end.
        """
        executable, closed = self._executable, ClosedModule(self.name)
        if isinstance(executable, ClosedModule):
            return
        self._bundle = self._executable = closed
        self._functions, self.own_weights, self.prepared = {}, None, {}
        self._submitted.clear()
        for user in [*self.functions.values(), *self.dependents]:
            user.close()
        executable.trim()
        if self._member is not None:
            self._member.close()

    def __enter__(self) -> LoadedModule:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_ahead(self) -> None:
        """Do all checks of first calls that do not depend on shapes; raise on failure."""
        for function in self._functions.values():
            function.check_ahead()

    def __getattr__(self, name: str) -> Any:
        functions = self.__dict__.get("functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(f"module {self.__dict__.get('name')!r} has no function {name!r}; it has {list(functions)}")

    def __dir__(self) -> list[str]:
        return sorted({*self._public, *self.functions})

    def __repr__(self) -> str:
        if isinstance(self._executable, ClosedModule):
            return f"<aotc module {self.name!r}, closed>"
        lines = [f"<aotc module {self.name!r} on {self._executable.stats()['target']}>"]
        return "\n".join(lines + [f"  {function.signature!r}" for function in self.functions.values()])

    def stats(self) -> dict[str, Any]:
        """Return target, devices, threads, kernels, memory (bytes) and counters (``docs/scheduling.md``)."""
        recordings = {"recordings": sum(function.recordings for function in self._functions.values())}
        return {**self._executable.stats(), **recordings, **({"devices": self.devices} if self.devices else {})}

    def trim(self) -> int:
        """Free unused working memory, also in the C library; return the number of bytes."""
        return self._executable.trim()
