"""Result of compiling a kernel: the image that the driver loads, and the resources in the linker's log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import msgpack


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code of a kernel, or PTX that the driver compiles.

    Attributes
    ----------
    data : bytes
        A cubin, or PTX with a trailing 0.
    resources : mapping of str to int
        Of a cubin: ``registers`` of a thread, ``shared`` bytes of a block, ``stack`` bytes of a thread, and ``spills``,
        the bytes of registers in the stack.
    """

    data: bytes
    resources: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Serialize the image for :func:`unpack_image`."""
        return msgpack.packb(asdict(self))


def unpack_image(data: bytes) -> Image:
    """Deserialize an image from the bytes of :meth:`Image.packed`."""
    return Image(**msgpack.unpackb(data))
