"""Zero-copy import of host arrays by DLPack, including dtypes and read-only arrays that NumPy's importer refuses."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from aotc.vmfb.devices.dlpack import CPU, PINNED, Handed, capsule_description


class _Shown:
    """Object with an array interface for NumPy over the memory of a DLPack capsule, which it keeps alive."""

    def __init__(self, found: Handed, owner: Any) -> None:
        plain = found.dtype if found.dtype.isbuiltin == 1 else np.dtype(f"u{found.dtype.itemsize}")
        self.kept = owner
        self.__array_interface__ = {
            "version": 3, "shape": found.shape, "typestr": plain.str, "strides": found.strides,
            "data": (found.address, found.read_only),
        }  # fmt: skip


def random_key_words(value: object) -> Any:
    """Return the u32 words of a typed random key (``jax.random.key``); other values unchanged.

    JAX is looked up among the loaded modules: a process that has such a key has imported it.
    """
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.Array) or not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value
    return jax.random.key_data(value)


def import_host_array(value: Any, writes: bool = False) -> np.ndarray | None:
    """Import a host array of another library as a NumPy array of the same memory; return None for GPU arrays.

    Raises
    ------
    BufferError
        If the array would be written but is read-only, or has an unknown dtype.
    """
    device = getattr(value, "__dlpack_device__", None)
    if device is None or device()[0] not in (CPU, PINNED):
        return None
    try:
        capsule = value.__dlpack__(max_version=(1, 0))
    except TypeError:  # the producer is older than DLPack 1.0
        capsule = value.__dlpack__()
    found = capsule_description(capsule)
    if writes and found.read_only:
        raise BufferError("it is read-only")
    if 0 in found.shape:
        return np.empty(found.shape, found.dtype)
    return np.asarray(_Shown(found, capsule)).view(found.dtype)
