"""Methods of a loaded module for data that outlives calls: arrays on devices, weights, bound arguments, states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from aotc.vmfb.arguments import type_text
from aotc.vmfb.errors import CallError

if TYPE_CHECKING:
    from aotc.vmfb.api.bound import Bound
    from aotc.vmfb.api.state import KeptState
    from aotc.vmfb.api.weighted import OwnWeights
    from aotc.vmfb.devices.array import DeviceArray
    from aotc.vmfb.interfaces import RuntimeModule


class ModuleState:
    """Base of :class:`aotc.vmfb.module.LoadedModule` for data that outlives calls."""

    name: str
    own_weights: OwnWeights | None

    @property
    def weights(self) -> dict[str, str]:
        """Return the types of the module's weights by path: ``{"params/w": "f32[4, 3]"}``."""
        own = self.own_weights
        return {} if own is None else {path: type_text(*row) for path, row in own.places.types.items()}

    def update_weights(self, values: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Replace some or all of the module's weights. A call reads either the old or the new ones, never a mixture.

        Parameters
        ----------
        values : mapping or path
            Arrays by path (``params/w``) or name (``params['w']``), dicts and lists of them by the names of pytrees; or
            a safetensors file with these paths.

        Raises
        ------
        CallError
            If a value does not fit (the message lists all), or the module has no weights of its own; then nothing
            changes.
        """
        if self.own_weights is None:
            hint = "compile with bind=[...] and weights='unpacked', or aotc.load(path, weights=...)"
            raise CallError(self.name, "the module has no weights of its own", hint=hint)
        self.own_weights.update(values)

    def put(self: RuntimeModule, x: Any, where: str = "") -> DeviceArray:
        """Place an array on a device: a copy, unless it is already there.

        Parameters
        ----------
        x : array
            A NumPy array, or an array of another library.
        where : str, optional
            The name of an argument of the default function, for the device where the function reads it; of a device of
            the model; or a device of this machine such as ``cuda:0``. By default the module's first GPU, or the host if
            it has none.

        Raises
        ------
        CallError
            If there is no such argument or device, or ``x`` does not fit the argument.
        """
        from aotc.vmfb.api import bound  # only for modules with such state

        return bound.put_on_device(self, x, where)

    def bind(
        self: RuntimeModule, values: Mapping[str | int, Any] = MappingProxyType({}), function: str = "", **named: Any
    ) -> Bound:
        """Return a function with bound arguments, which stay on the device where the function reads them.

        Parameters
        ----------
        values : mapping, optional
            Arrays by the names or numbers of arguments, pytrees by the names of trees. Arguments that the model was
            compiled to bind (``bind=``) are prepared now; for others, a GPU has copies, and the CPU reads the arrays in
            place.
        function : str, optional
            Name of the function; by default the default function.
        **named : array or pytree
            The same as keywords: ``module.bind(params=params)`` is ``module.bind({"params": params})``.

        Raises
        ------
        CallError
            If there is no such function or argument, values do not fit, or an argument is donated.
        """
        from aotc.vmfb.api import bound

        return bound.bind_arguments(self, values, named, function)

    def state(
        self: RuntimeModule, *names: str, results: Mapping[str, str] | None = None,
        init: Mapping[str, Any] | None = None,
    ) -> KeptState:  # fmt: skip
        """Return a state: arguments that are results of the previous call, on their device; see ``docs/state.md``.

        Parameters
        ----------
        *names : str
            Arguments, or pytrees of them, of any function of the module: ``"cache"``.
        results : mapping of str to str, optional
            The argument that a result becomes, ``{"result[0]": "cache"}``; by default the pairs given as ``state=``
            when compiling, and equal names.
        init : mapping of str to pytree, optional
            Initial values, also for ``reset()``; zeros where there are none.

        Raises
        ------
        CallError
            If there is no such argument, no result becomes it, or functions disagree about its type.
        """
        from aotc.vmfb.api.state import KeptState  # only for modules with states

        return KeptState(self, names, results, init)
