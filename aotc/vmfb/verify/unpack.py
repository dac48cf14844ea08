"""Decoding of msgpack data from files, with a limit on the memory of the decoded objects.

An empty map is one byte of msgpack and 64 bytes of memory, so 10 MB of maps would take 775 MB before schema validation.
Containers are therefore counted as they are created. Counting takes a Python call for each container, which would slow
down loading; data whose bytes cannot encode that many containers, as in every real bundle, is decoded without it.
"""

from __future__ import annotations

from typing import Any

import msgpack

_MAPS = bytes((*range(0x80, 0x90), 0xDE, 0xDF))
_LISTS = bytes((*range(0x90, 0xA0), 0xDC, 0xDD))
_NOT_MAPS = bytes(set(range(256)) - set(_MAPS))
_NOT_LISTS = bytes(set(range(256)) - set(_LISTS))


class _ContainerLimit:
    """Hook of msgpack that counts decoded containers, and refuses more than ``limit``."""

    def __init__(self, kind: str, limit: int) -> None:
        self.kind, self.limit, self.count = kind, limit, 0

    def __call__(self, container: Any) -> Any:
        self.count += 1
        if self.count > self.limit:
            raise ValueError(f"it has more than {self.limit:,} {self.kind}, too many for its size")
        return container


# Maps, and lists, that msgpack data of any size may have. This many take 12 MB as Python objects; manifests of small
# models have fewer.
FREE_CONTAINERS = 50_000
# Bytes of msgpack data required for each further map. A map in a manifest names its keys; an empty one is a single byte
# of data but takes 64 bytes as a Python dict.
BYTES_PER_MAP = 16
# Bytes of msgpack data required for each further list. The shortest program instruction is a list of two numbers, 3
# bytes; an empty list is a single byte of data but takes 64 bytes as a Python object.
BYTES_PER_LIST = 3


def unpack_msgpack(data: bytes | bytearray | memoryview, **options: Any) -> Any:
    """Decode msgpack ``data``; the objects take at most about 30 bytes of memory for each byte of data.

    Parameters
    ----------
    data : bytes or buffer
    **options
        Options of :func:`msgpack.unpackb`.

    Raises
    ------
    ValueError
        If the data has more maps or lists than its size allows.
    Exception
        As raised by :func:`msgpack.unpackb` for data that is not msgpack.
    """
    packed = bytes(data)
    most_maps, most_lists = (FREE_CONTAINERS + len(packed) // n for n in (BYTES_PER_MAP, BYTES_PER_LIST))
    if len(packed) > FREE_CONTAINERS:
        if len(packed.translate(None, _NOT_MAPS)) > most_maps:
            options["object_hook"] = _ContainerLimit("maps", most_maps)
        if len(packed.translate(None, _NOT_LISTS)) > most_lists:
            options["list_hook"] = _ContainerLimit("lists", most_lists)
    return msgpack.unpackb(packed, raw=False, strict_map_key=False, **options)
