"""What a kernel compiles to: what the driver loads, and what the linker says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import msgpack


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code, or text that the driver compiles.

    Attributes
    ----------
    data : bytes
        A cubin, or PTX with a 0 at its end.
    resources : mapping of str to int
        Of a cubin: ``registers`` of a thread, ``shared`` bytes of a block, ``stack`` bytes of a thread, and the bytes
        of registers that it ``spills`` there.
    """

    data: bytes
    resources: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return all of it as bytes, which :func:`unpacked` reads."""
        return msgpack.packb(asdict(self))


def unpacked(data: bytes) -> Image:
    """Return what :meth:`Image.packed` made bytes of."""
    return Image(**msgpack.unpackb(data))
