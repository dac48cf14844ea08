"""Output of compiling a kernel: the image that the driver loads, and the linker's report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import msgpack


@dataclass(frozen=True, slots=True)
class Image:
    """Machine code, or PTX that the driver compiles.

    Attributes
    ----------
    data : bytes
        A cubin, or PTX with a trailing 0.
    resources : mapping of str to int
        Of a cubin: ``registers`` of a thread, ``shared`` bytes of a block, ``stack`` bytes of a thread, and the bytes
        of registers that it ``spills`` there.
    """

    data: bytes
    resources: Mapping[str, int] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return the image as bytes for :func:`unpack_image`."""
        return msgpack.packb(asdict(self))


def unpack_image(data: bytes) -> Image:
    """Return the image from the bytes of :meth:`Image.packed`."""
    return Image(**msgpack.unpackb(data))
