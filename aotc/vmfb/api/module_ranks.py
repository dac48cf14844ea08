"""Methods of a loaded module of several ranks: cut whole arrays into a rank's parts, and gather whole results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb.api.entry import NamedFunctions
from aotc.vmfb.errors import ArgumentError, CallError

if TYPE_CHECKING:
    from aotc.vmfb.arguments import Signature
    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.ranks.layout import Mesh
    from aotc.vmfb.ranks.member import Member


class RankedModule(NamedFunctions):
    """Base of :class:`aotc.vmfb.module.LoadedModule` for bundles of several ranks."""

    _member: Member | None

    @property
    def rank(self) -> int:
        """The number of this process among those that run the model together; 0 for a model of one device."""
        return 0 if self._member is None else self._member.rank

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of ranks that the model was compiled for; None for a model of one device."""
        return None if self._member is None else self._member.mesh

    def shard(self, *args: Any, function: str = "") -> tuple[Any, ...]:
        """Return this rank's parts of the arguments of a call: ``module(*module.shard(params, x))``.

        Parameters
        ----------
        *args
            The positional arguments of the function, with whole arrays; parts are views where that is possible.
        function : str, optional
            Name of the function; by default the default function.

        Raises
        ------
        CallError
            If an array has not its whole shape, or the model is for one device.
        """
        member, name = self.own_member(), function or self.default_name()
        entry = self.functions[name]
        values = entry.flatten(args, {})
        rows = self.bucket_of(name, values).arguments
        return entry.arguments_from_leaves([member.part(row, x) for row, x in zip(rows, values, strict=True)])

    def gather(self, results: object, *, function: str = "") -> Any:
        """Return the results of a call with whole arrays, on each rank: all ranks gather together.

        Parameters
        ----------
        results
            What a call has returned: its structure, with this rank's parts.
        function : str, optional
            Name of the function; by default the default function.

        Raises
        ------
        CallError
            If an array is not this rank's part, a rank ended, or the model is for one device.
        """
        member, name = self.own_member(), function or self.default_name()
        entry = self.functions[name]
        parts = entry.flatten_results(results)
        return entry.rebuild(member.gather(self.bucket_of(name, parts, "results").results, parts))

    def bucket_of(self, name: str, values: Sequence[Any], side: str = "arguments") -> Signature:
        """Return the signature of a function; of one with buckets, that for whole ``arguments`` or parts of results.

        Raises
        ------
        CallError
            If no bucket has these sizes.
        """
        buckets = getattr(self.get_function(name), "buckets", None)
        if buckets is None:
            return self.functions[name].signature
        own = buckets.of_arguments(values, "whole") if side == "arguments" else buckets.of_results(values)
        found: Signature = buckets.signatures[own]
        return found

    if TYPE_CHECKING:

        def get_function(self, name: str) -> RuntimeFunction:
            """Return a function of the module by name."""

        def invoke(self, name: str, *arrays: Any) -> list[Any]:
            """Run a function on flat arrays, this rank's parts."""

    def own_member(self) -> Member:
        """Return this process's membership in the group of ranks.

        Raises
        ------
        CallError
            If the model is for one device.
        """
        if self._member is None:
            raise CallError(self.name, "the model is for one device: its arrays are whole", hint="module(x), as it is")
        return self._member


class WholeFunction:
    """A function on whole arrays; all ranks call it together with equal arguments, and each computes on its part.

    Attributes
    ----------
    signature : Signature
        With the shapes of whole arrays.
    """

    def __init__(self, module: RankedModule, name: str) -> None:
        from aotc.vmfb.ranks.cut import whole_signature  # only for bundles of several ranks

        self._module, self._name = module, name
        self.signature = whole_signature(module.functions[name].signature)

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Cut flat, whole arguments into this rank's parts, run the function, and gather whole results on each rank.

        Raises
        ------
        CallError
            If an argument does not have the shape of the whole array, or a rank ended.
        """
        member, count = self._module.own_member(), len(self.signature.arguments)
        if len(values) != count:
            raise ArgumentError(self._name, "wrong number of arguments", len(values), count)
        rows = self._module.bucket_of(self._name, values)
        parts = [member.part(row, value) for row, value in zip(rows.arguments, values)]
        found: list[Any] = member.gather(rows.results, self._module.invoke(self._name, *parts))
        return found
