"""Functions of a module whose bundle has weights of its own: the weights are bound, calls pass the other arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aotc.vmfb.api.partial import Made, OpenFunction, PartialFunction, bind_placed_arguments, place_bound_values
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.memory.mapped_file import mapped_file_check
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.weights.own import WeightPlaces, read_own_weights, validate_weights, weight_places_of
from aotc.vmfb.weights.shards import is_shard_folder, weights_of_rank
from aotc.vmfb.weights.tensors import read_tensors, require_tensor_types

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeFunction, RuntimeModule
    from aotc.vmfb.memory.mapped_file import MappedFile
    from aotc.vmfb.ranks.layout import Mesh


class _UnboundFunctions(NamedTuple):
    """The functions of a module as they were before its weights were bound."""

    name: str
    home: str
    prepared: Mapping[str, Any]
    every: Mapping[str, RuntimeFunction]

    def get_function(self, name: str) -> RuntimeFunction:
        """Return a function with all its arguments unbound."""
        return self.every[name]


class OwnWeights:
    """The bound weights of a module's functions, which :meth:`update` replaces."""

    def __init__(
        self,
        whole: _UnboundFunctions,
        places: WeightPlaces,
        arrays: dict[str, np.ndarray],
        files: dict[str, MappedFile | None],
        ranked: tuple[Mesh, int] | None,
    ) -> None:
        self._whole, self.places, self._arrays, self._ranked = whole, places, arrays, ranked
        self._files = files  # the file that each array is in
        self._lock = new_lock()
        self.functions = {
            name: OpenFunction(whole.get_function(name), places.functions[name].values(), partial)
            for name, partial in self._bind_weights(arrays).items()
        }

    def update(self, values: Any) -> None:
        """Replace some weights by path; all functions read the new ones from the next call on.

        ``values`` is a mapping, or the path of a safetensors file or of a folder of shards.
        """
        file = None
        files: Mapping[str, MappedFile | None] = {}
        if isinstance(values, str | os.PathLike):
            if self._ranked is not None and is_shard_folder(values):
                values, files = weights_of_rank(values, self.places, *self._ranked)
            else:
                values = read_tensors(values)
                file = values.file
        found = _copy_writable_arrays(validate_weights(values, self.places, self._whole.name, whole=False))
        with self._lock:  # concurrent updates must not undo each other
            mapped_file_check(
                [x for x in {f for path, f in self._files.items() if path not in found} if x is not None]
            )()
            arrays = {**self._arrays, **found}
            self._files.update({**dict.fromkeys(found, file), **files})
            for name, partial in self._bind_weights(arrays).items():
                self.functions[name].replace_bound_values(partial)
            self._arrays = arrays

    def _bind_weights(self, arrays: Mapping[str, np.ndarray]) -> dict[str, PartialFunction]:
        """Return each function with the weights ``arrays``, by path, bound.

        Values that several functions read are copied to a device only once.
        """
        placed: dict[str, Any] = dict(arrays)
        made: Made = {}
        bounds = {}
        for name, own in self.places.functions.items():
            held = place_bound_values(
                self._whole, self._whole.get_function(name), {n: placed[path] for path, n in own.items()}
            )
            placed.update((path, held[n]) for path, n in own.items())
            bounds[name] = bind_placed_arguments(self._whole, name, held, made)
        self._watch_mapped_files(arrays, bounds)
        return bounds

    def _watch_mapped_files(self, arrays: Mapping[str, np.ndarray], bounds: Mapping[str, PartialFunction]) -> None:
        """Let calls check that the mapped files that they read are unchanged; release pages that no call reads."""
        for name, bound in bounds.items():
            read = {address_of(x.numpy()) for x in bound.arrays.values() if x.ordinal < 0}
            files = {self._files[path] for path in self.places.functions[name] if address_of(arrays[path]) in read}
            mapped = [file for file in files if file is not None and file.is_mapped]
            bound.check = mapped_file_check(mapped) if mapped else None
        self._release_unread_pages(arrays, bounds)

    def _release_unread_pages(self, arrays: Mapping[str, np.ndarray], bounds: Mapping[str, PartialFunction]) -> None:
        """Release the mapped pages of weights that calls do not read: only a later update needs them."""
        held = [x for bound in bounds.values() for x in bound.arrays.values()]
        read = {address_of(x.numpy()) for x in held if x.ordinal < 0}
        for path, x in arrays.items():
            file = self._files[path]
            if file is not None and address_of(x) not in read:
                file.release_pages(address_of(x), x.nbytes)


def _copy_writable_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that no caller can change: read-only ones unchanged, copies of writable ones."""
    return {path: x.copy() if x.flags.writeable else x for path, x in arrays.items()}


def bind_module_weights(
    module: RuntimeModule, bundle: OpenedBundle, variant: Mapping[str, Any], weights: Any, verify: bool
) -> OwnWeights:
    """Bind weights to a module's functions: ``weights``, from the user, or the bundle's own.

    Raises
    ------
    BundleError
        If there are none, they are not the bundle's own, or the bundle was compiled without bound arguments.
    CallError
        If ``weights`` do not fit.
    """
    places = weight_places_of(bundle.manifest, variant, bundle.where)
    ranked = None if module.mesh is None else (module.mesh, module.rank)
    files: dict[str, MappedFile | None] = {}
    file = None
    if ranked is not None and isinstance(weights, str | os.PathLike):
        arrays, files = weights_of_rank(weights, places, *ranked, verify)
    elif isinstance(weights, str | os.PathLike):
        tensors = read_tensors(weights)
        arrays, file = require_tensor_types(tensors, places.types, os.fspath(weights)), tensors.file
    elif weights is not None:
        arrays = _copy_writable_arrays(validate_weights(weights, places, bundle.where))
    else:
        arrays, file = read_own_weights(bundle, places.types, verify)
    every = module.every_function
    whole = _UnboundFunctions(module.name, module.home, module.prepared, every)
    own = OwnWeights(whole, places, arrays, files or dict.fromkeys(arrays, file), ranked)
    for name in own.functions:
        halves = module.prepared.get(name, {})
        for row in (halves[key] for key in ("prepare", "call") if key in halves):
            for half in (every[row["name"]], every[row["name"]].direct):
                half.where = every[name].where  # errors have the name of the called function
    return own
