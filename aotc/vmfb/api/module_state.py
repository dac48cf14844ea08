"""What a module keeps between calls: arrays on devices, arguments that were given once, states."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from aotc.vmfb.arguments import type_text
from aotc.vmfb.errors import VmError

if TYPE_CHECKING:
    from aotc.vmfb.api.bound import Bound
    from aotc.vmfb.api.state import KeptState
    from aotc.vmfb.api.weighted import OwnWeights
    from aotc.vmfb.devices.array import DeviceArray


class Keeping:
    """The part of a :class:`aotc.vmfb.module.LoadedModule` that outlives calls."""

    name: str
    own_weights: OwnWeights | None

    @property
    def weights(self) -> dict[str, str]:
        """Return the types of the module's weights by their paths: ``{"params/w": "f32[4, 3]"}``."""
        own = self.own_weights
        return {} if own is None else {path: type_text(*row) for path, row in own.places.types.items()}

    def update_weights(self, values: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Replace some of the module's weights, or all. A call reads the old ones or the new ones, never some of both.

        Parameters
        ----------
        values : mapping or path
            Arrays by paths (``params/w``) or names (``params['w']``), dicts and lists of them by the names of trees; or
            a file of safetensors with these paths.

        Raises
        ------
        VmError
            Lists all that does not fit; then nothing changes. Also if the module has no weights of its own.
        """
        if self.own_weights is None:
            hint = "compile with bind=[...] and weights='unpacked', or aotc.load(path, weights=...)"
            raise VmError(self.name, "the module has no weights of its own", hint=hint)
        self.own_weights.update(values)

    def put(self, x: Any, where: str = "") -> DeviceArray:
        """Return an array on a device: a copy, unless it is there already.

        Parameters
        ----------
        x : array
            Of NumPy, or of any library.
        where : str, optional
            The name of an argument of the default function, which is put where the function reads it; of a device of
            the model; or a place as ``cuda:0``. By default the module's first GPU, or the host if it has none.

        Raises
        ------
        VmError
            If there is no such argument or device, or ``x`` does not fit the argument.
        """
        from aotc.vmfb.api import bound  # for those who keep arrays on devices

        return bound.put(self, x, where)

    def bind(self, values: Mapping[str | int, Any], function: str = "") -> Bound:
        """Return a function some of whose arguments are given once; they stay where it reads them.

        Parameters
        ----------
        values : mapping
            Arrays by the names or numbers of arguments, pytrees by those of trees. What the model was compiled to be
            bound with (``bind=``) is read as it was prepared now; of the rest a GPU has copies, the CPU the arrays.
        function : str, optional
            By default the default function.

        Raises
        ------
        VmError
            If there is no such function or argument, values do not fit, or an argument is donated.
        """
        from aotc.vmfb.api import bound

        return bound.bind(self, values, function)

    def state(
        self, *names: str, results: Mapping[str, str] | None = None, init: Mapping[str, Any] | None = None
    ) -> KeptState:
        """Return arguments whose values are results of the call before, on their device; see ``docs/state.md``.

        Parameters
        ----------
        *names : str
            Arguments, or trees of them, of any function of the module: ``"cache"``.
        results : mapping of str to str, optional
            The argument that a result becomes, ``{"result[0]": "cache"}``; by default what ``state=`` said when
            compiling, and of equal names.
        init : mapping of str to pytree, optional
            What it begins with, and goes back to by ``reset()``; zeros where nothing is given.

        Raises
        ------
        VmError
            If there is no such argument, no result becomes it, or functions disagree about its type.
        """
        from aotc.vmfb.api.state import KeptState  # for those who have states

        return KeptState(self, names, results, init)
