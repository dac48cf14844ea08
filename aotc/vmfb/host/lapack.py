"""LAPACK for kernels that call it, from the OpenBLAS in NumPy's wheels or from a separate wheel.

The library has 64-bit integers and decorated names (``scipy_dgetrf_64_``), so that it does not conflict with another
LAPACK in the process. Its thread count is global to the process: during calls of a bundle it is 1, because kernels run
in parallel on aotc's own threads and results must not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.locks import after_fork, new_lock

_SYMBOL = "scipy_{}_64_"
_GET_THREADS, _SET_THREADS = "scipy_openblas_get_num_threads64_", "scipy_openblas_set_num_threads64_"


def lapack_install_command() -> str:
    """Return the shell command that installs a LAPACK library."""
    from aotc.vmfb.host.install import install_command  # imports importlib.metadata: only for errors

    return f"{install_command('lapack')}, which brings scipy-openblas64"


def library_candidates() -> list[Path]:
    """Return the paths of LAPACK libraries to try, best first."""
    found = sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so*"))
    wheel = importlib.util.find_spec("scipy_openblas64")
    if wheel is not None and wheel.submodule_search_locations:
        for folder in wheel.submodule_search_locations:
            found += sorted(Path(folder, "lib").glob("libscipy_openblas64_*.so*"))
    return found


class Lapack:
    """A loaded LAPACK library and the addresses of its functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._lock = new_lock()
        self._calls = 0
        self._before = 1
        self._lowered = False
        self._get = getattr(library, _GET_THREADS, None)
        self._set = getattr(library, _SET_THREADS, None)

    def address(self, function: str) -> int:
        """Return the address of ``function`` (``dgetrf``), or 0 if the library lacks it."""
        found = getattr(self._library, _SYMBOL.format(function), None)
        return 0 if found is None else ctypes.cast(found, ctypes.c_void_p).value or 0

    def limit_to_one_thread(self) -> None:
        """Set the library's thread count to 1 until the matching :meth:`restore_threads`; calls may nest."""
        if self._get is None or self._set is None:
            return
        with self._lock:
            if self._calls == 0 and not self._lowered:
                self._before = self._get()
                self._lowered = self._before != 1
                if self._lowered:
                    self._set(1)
            self._calls += 1

    def restore_threads(self) -> None:
        """Undo one :meth:`limit_to_one_thread`; the last one restores the thread count."""
        if self._get is None or self._set is None:
            return
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._lowered:
                self._lowered = False
                self._set(self._before)

    def reset_after_fork(self) -> None:
        """Reset in a forked child: the calls of the parent's other threads do not exist there."""
        self._calls = 0


_OPEN: list[Lapack] = []
_LOCK = new_lock()


def _load_first_available(paths: Iterable[Path]) -> list[Lapack]:
    """Load the first of these libraries that the dynamic loader accepts; return an empty list if it accepts none."""
    for path in paths:
        try:
            return [Lapack(ctypes.CDLL(str(path)))]
        except OSError:
            continue
    return []


def _reset_after_fork() -> None:
    for lapack in _OPEN:
        lapack.reset_after_fork()


after_fork(_reset_after_fork)


def open_lapack(where: str, functions: Iterable[str]) -> tuple[Lapack, dict[str, int]]:
    """Return the process's LAPACK and the addresses of ``functions``.

    Parameters
    ----------
    where : str
        The bundle, for messages.
    functions : iterable of str
        Names such as ``dgetrf``.

    Raises
    ------
    BundleError
        If there is no library, or it lacks a function; the message has the searched paths and a command.
    """
    wanted = list(functions)
    searched = library_candidates()
    with _LOCK:
        if not _OPEN:
            _OPEN.extend(_load_first_available(searched))
    if not _OPEN:
        raise BundleError(
            where,
            f"the bundle calls LAPACK ({', '.join(wanted[:4])}) and no LAPACK library was found",
            ", ".join(map(str, searched)) or f"no OpenBLAS beside NumPy {np.__version__}, no package scipy_openblas64",
            "an OpenBLAS with 64-bit integers, as NumPy's wheels carry one",
            lapack_install_command(),
        )
    addresses = {name: _OPEN[0].address(name) for name in wanted}
    missing = [name for name, address in addresses.items() if not address]
    if missing:
        what, hint = f"the LAPACK library lacks {', '.join(missing)}", lapack_install_command()
        raise BundleError(where, what, ", ".join(map(str, searched)), hint=hint)
    return _OPEN[0], addresses
