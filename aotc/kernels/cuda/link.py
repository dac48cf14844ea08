"""nvJitLink: LTO-IR to a cubin, and the registers and memory that its log reports."""

from __future__ import annotations

import re

from aotc.diagnostics import InternalError
from aotc.kernels.cuda.image import Image

_OPTIONS = ("-lto", "-fma=0", "-verbose", "-no-cache")  # a result of its own cache has no log
_RESOURCES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared": re.compile(r"(\d+) bytes smem"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
    "spills": re.compile(r"(\d+) bytes spill stores"),
}


def link(ltoir: bytes, arch: str, symbol: str) -> Image:
    """Return the cubin of the kernel ``symbol`` for ``arch``, e.g. ``sm_90a``.

    Raises
    ------
    InternalError
        If nvJitLink refuses it; its log is in the message.
    """
    from cuda.bindings import nvjitlink

    options = [f"-arch={arch}", *_OPTIONS]
    handle = nvjitlink.create(len(options), options)
    try:
        nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), symbol)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        raise InternalError(f"kernel {symbol}: {error}\n{log.decode(errors='replace')}") from error
    finally:
        nvjitlink.destroy(handle)
    return Image(bytes(cubin), resources_of(log.decode(errors="replace")))


def resources_of(log: str) -> dict[str, int]:
    """Return the kernel's resources from the linker's log; missing ones are 0."""
    found = {name: pattern.search(log) for name, pattern in _RESOURCES.items()}
    return {name: int(match[1]) if match else 0 for name, match in found.items()}
