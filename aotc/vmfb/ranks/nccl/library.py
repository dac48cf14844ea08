"""The functions of NCCL, through ctypes; the library is loaded when a sharded model first needs it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_byte, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.install import install_command
from aotc.vmfb.host.locks import new_lock

LIBRARY_VARIABLE = "AOTC_NCCL_LIBRARY"
ID_BYTES = 128  # NCCL_UNIQUE_ID_BYTES
_IN_PROGRESS = 7  # ncclInProgress
_UNSET = -(1 << 31)  # NCCL_CONFIG_UNDEF_INT
_MAGIC = 0xCAFEBEEF


class UniqueId(Structure):
    """ctypes form of ncclUniqueId."""

    _fields_ = (("data", c_byte * ID_BYTES),)


class Config(Structure):
    """ctypes form of ncclConfig_t with the fields of NCCL 2.18; later versions append fields and accept these."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )

    @classmethod
    def of_blocking(cls) -> Config:
        """Return the defaults: calls return when they are enqueued."""
        return cls(ctypes.sizeof(cls), _MAGIC, 21805, 1, _UNSET, _UNSET, _UNSET, None, _UNSET)


_MOVE = (c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p)  # array, count, dtype, peer, communicator, stream
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "ncclGetVersion": (POINTER(c_int),),
    "ncclGetUniqueId": (POINTER(UniqueId),),
    "ncclCommInitRankConfig": (POINTER(c_void_p), c_int, UniqueId, c_int, POINTER(Config)),
    "ncclCommGetAsyncError": (c_void_p, POINTER(c_int)),
    "ncclCommAbort": (c_void_p,),
    "ncclCommDestroy": (c_void_p,),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
    "ncclAllReduce": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclReduceScatter": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclAllGather": (c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p),
    "ncclBroadcast": (c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p),
    "ncclSend": _MOVE,
    "ncclRecv": _MOVE,
}


class Nccl:
    """The loaded library.

    Attributes
    ----------
    version : str
        Such as ``2.28.9``.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name, arguments in SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        library.ncclGetErrorString.restype = c_char_p
        number = c_int()
        self.call("ncclGetVersion", byref(number))
        major, rest = divmod(number.value, 10_000)
        self.version = f"{major}.{rest // 100}.{rest % 100}"

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of NCCL.

        Raises
        ------
        CallError
            If it fails; the message has its name and NCCL's error.
        """
        status = getattr(self._library, name)(*arguments)
        if status not in (0, _IN_PROGRESS):
            raise CallError("", f"{name} failed", self.text(status), hint="NCCL_DEBUG=WARN shows what NCCL found")

    def text(self, status: int) -> str:
        """Return NCCL's words for a status."""
        return str((self._library.ncclGetErrorString(status) or b"").decode())

    def async_error(self, communicator: c_void_p) -> str:
        """Return the error that a communicator has met since its last call; empty if none."""
        status = c_int()
        self.call("ncclCommGetAsyncError", communicator, byref(status))
        return self.text(status.value) if status.value not in (0, _IN_PROGRESS) else ""


_LOCK = new_lock()
_FOUND: list[Nccl | str] = []  # the library, or the reason why there is none


def find_nccl() -> Nccl | str:
    """Return NCCL, or the reason why this process cannot load it.

    ``$AOTC_NCCL_LIBRARY`` names the library; else it is that of the package ``nvidia-nccl-cu13``, which JAX and PyTorch
    for CUDA install too, or ``libnccl.so.2`` of the system.
    """
    with _LOCK:
        if not _FOUND:
            _FOUND.append(_load())
    return _FOUND[0]


def nccl() -> Nccl:
    """Return NCCL.

    Raises
    ------
    CallError
        If it is not installed.
    """
    found = find_nccl()
    if isinstance(found, str):
        hint = f"{install_command('nccl')}, or {LIBRARY_VARIABLE}=/path/of/libnccl.so.2"
        raise CallError("", "ranks on GPUs exchange data by NCCL, which is not here", found, hint=hint)
    return found


def _load() -> Nccl | str:
    """Load the first NCCL library that works; return the reasons as text if none does."""
    # NVLink's multicast can take the GPUs of a shared host out of service when a process ends in the middle of it.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")  # ranks would register buffers only together
    reasons = []
    for path in _candidates():
        try:
            return Nccl(ctypes.CDLL(path))
        except (OSError, AttributeError, CallError) as error:
            reasons.append(f"{path}: {error}")
    return "; ".join(reasons)


def _candidates() -> Iterator[str]:
    """Yield the paths of NCCL libraries to try: that of the environment variable, or else pip's and the system's."""
    if named := os.environ.get(LIBRARY_VARIABLE):
        yield named
        return
    for folder in sys.path:
        yield from map(str, sorted(Path(folder or ".", "nvidia").glob("nccl/lib/libnccl.so.2")))
    yield "libnccl.so.2"
