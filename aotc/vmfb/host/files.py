"""Atomic file writes, and private folders for temporary files.

A file is written without a name and then linked to its path, so that a killed writer leaves nothing behind. If the file
system cannot do that, and briefly while a new file replaces an old one, the file has a temporary name. Its writer then
holds a lock on it, which the system releases when the process ends. A temporary file that can be locked has no writer
any more, and the next writer in that folder removes it. The same holds for temporary folders.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EAGAIN
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = ".aotc-"
_WORK, _REPORT = "work-", "report-"


def write_atomically(path: str, parts: Iterable[Any], durable: bool = True) -> None:
    """Write buffers in order to a path that the user has specified; a regular file appears whole or not at all.

    The mode is that of the file that is replaced. The target of a link is replaced, not the link. Devices, pipes and
    descriptors of this process (``/dev/stdout``), which cannot be replaced, are written in place.

    Raises
    ------
    OSError
        If writing fails; has the name of the file. An existing file is unchanged.
    """
    try:
        descriptor = _open_special_file(path)
        if descriptor is not None:
            try:
                write_buffers(descriptor, parts)
            finally:
                os.close(descriptor)
            return
        target = os.path.realpath(path)
        folder, name = os.path.split(target)
        from zlib import crc32  # not needed by a process that only loads

        prefix = f"{_PREFIX}{crc32(os.fsencode(name)):08x}-"
        remove_stale_temporaries(folder, prefix)
        replace_file(target, parts, os.path.join(folder, prefix), durable=durable)
    except OSError as error:
        raise _error_with_path(error, path) from error


def append_all_or_none(path: str, parts: Iterable[Any]) -> None:
    """Append buffers to a file, all of them or none.

    Raises
    ------
    OSError
        If writing fails; has the name of the file. Its content is then unchanged.
    """
    new = not os.path.lexists(path)
    try:
        with open(path, "ab", buffering=0) as file:
            before = os.fstat(file.fileno())
            try:
                write_buffers(file.fileno(), parts)
            except BaseException:
                if stat.S_ISREG(before.st_mode):
                    os.ftruncate(file.fileno(), before.st_size)
                raise
    except OSError as error:
        if new:
            with suppress(OSError):
                os.unlink(path)
        raise _error_with_path(error, path) from error


def replace_file(path: str, parts: Iterable[Any], temporary: str, mode: int = 0, durable: bool = False) -> None:
    """Write a file under a temporary name in the same file system, and rename it to ``path``.

    Parameters
    ----------
    path : str
    parts : iterable of buffers
    temporary : str
        A folder, and the prefix of temporary names in it.
    mode : int
        Permissions; 0 for those of the replaced file, or the default for a new file.
    durable : bool
        Wait until the data is on disk.
    """
    descriptor, name = _create_locked_file(temporary, mode or 0o666)
    try:
        if not mode:
            with suppress(OSError):
                os.fchmod(descriptor, os.stat(path).st_mode & 0o777)
        write_buffers(descriptor, parts)
        if durable:
            os.fsync(descriptor)
        if not name and _link_unnamed_file(descriptor, path):
            return
        name = name or _link_under_temporary_name(descriptor, temporary)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(descriptor)


def _link_unnamed_file(descriptor: int, path: str) -> bool:
    """Link an open unnamed file to ``path``; return False if the path exists."""
    with suppress(FileExistsError):
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor)  # with a folder, Python follows the link
        return True
    return False


def _link_under_temporary_name(descriptor: int, temporary: str) -> str:
    """Link an open unnamed file to a temporary name that starts with ``temporary``, and return the name."""
    while not _link_unnamed_file(descriptor, name := f"{temporary}{os.urandom(6).hex()}"):
        pass
    return name


def remove_stale_temporaries(folder: str, prefix: str = _PREFIX) -> None:
    """Remove files and folders whose name starts with ``prefix`` and whose writing process has ended."""
    with suppress(OSError):
        for name in os.listdir(folder or "."):
            if name.startswith(prefix):
                _remove_unlocked(os.path.join(folder, name))


def ensure_private_folder(path: str) -> str:
    """Create a folder if necessary; raise an error if another user can write to it.

    Raises
    ------
    PermissionError
        If others can write to it; the message is a sentence.
    OSError
        If the folder cannot be created.
    """
    os.makedirs(path, mode=0o700, exist_ok=True)
    reason = other_writers(os.stat(path))
    if reason:
        raise PermissionError(f"{path} {reason}")
    return path


def other_writers(info: os.stat_result) -> str:
    """Describe the users other than this one and root who can change a file or folder; an empty string if none can."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {info.st_uid}, not to you"
    if info.st_mode & 0o022:
        return f"may be written to by others (mode {stat.S_IMODE(info.st_mode):o})"
    return ""


def temporary_path() -> str:
    """Return a unique path that does not exist yet, for :func:`temporary_folder`."""
    return os.path.abspath(os.path.join(_temporary_root_of_user(), f"{_WORK}{os.urandom(6).hex()}"))


@contextmanager
def temporary_folder(path: str = "") -> Iterator[Path]:
    """Create a folder for temporary files, and remove it after the block.

    If this process is killed, the next process that creates one removes the folder.
    """
    from pathlib import Path
    from shutil import rmtree

    path = path or temporary_path()
    home = ensure_private_folder(os.path.dirname(path))
    remove_stale_temporaries(home, _WORK)
    descriptor = -1
    while descriptor < 0:
        with suppress(FileNotFoundError, FileExistsError):  # another process took it for a stale one and removes it
            os.mkdir(path, 0o700)
            descriptor = _lock_new_file(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        yield Path(path)
    finally:
        rmtree(path, ignore_errors=True)
        os.close(descriptor)


def report_folder(keep: int) -> str:
    """Create a folder for a failure report; remove all but the last ``keep`` older ones."""
    from shutil import rmtree

    home = ensure_private_folder(_temporary_root_of_user())
    with suppress(OSError):
        old = [e for e in os.scandir(home) if e.name.startswith(_REPORT)]
        for entry in sorted(old, key=lambda e: e.stat(follow_symlinks=False).st_mtime_ns, reverse=True)[keep:]:
            rmtree(entry.path, ignore_errors=True)
    return _create_new_folder(home, _REPORT)


def permanent_folder(name: str) -> str:
    """Create the folder ``name`` of this user among the system's temporary files, and return its path.

    Nothing removes it.
    """
    path = os.path.join(_temporary_root_of_user(), name)
    os.makedirs(path, exist_ok=True)
    return path


def _temporary_root_of_user() -> str:
    """Return the path of this user's folder among the system's temporary files.

    The folder is not created here: :func:`ensure_private_folder` does that. If another user has taken the name, a new
    folder is created.
    """
    from tempfile import gettempdir, mkdtemp

    try:
        path = os.path.join(gettempdir(), f"aotc-{os.geteuid()}")
    except FileNotFoundError as error:
        raise _error_with_path(error, "TMPDIR") from error
    return mkdtemp(prefix="aotc-") if _exists_but_is_not_private(path) else path


def _exists_but_is_not_private(path: str) -> bool:
    """Return True if the path exists and is anything but a folder that only this user can write to."""
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(info.st_mode) or bool(other_writers(info))


def _create_new_folder(home: str, prefix: str) -> str:
    from tempfile import mkdtemp

    return mkdtemp(prefix=prefix, dir=home)


def write_buffers(descriptor: int, parts: Iterable[Any]) -> None:
    """Write buffers in order to an open file, each completely."""
    for part in parts:
        data = memoryview(part)
        data = data.cast("B") if data.nbytes else memoryview(b"")  # an empty array cannot be cast
        while data.nbytes:
            data = data[os.write(descriptor, data) :]


def _error_with_path(error: OSError, path: str) -> OSError:
    """Return a copy of an OSError with ``path``, as the user specified it."""
    return OSError(error.errno, error.strerror or str(error), path)


def _open_special_file(path: str) -> int | None:
    """Open a device, a pipe or a descriptor of this process for writing in place.

    Return None for regular and new files.
    """
    own = _descriptor_of_proc_path(path)
    if own is not None:
        return os.dup(own)
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return None
    return None if regular else os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def _descriptor_of_proc_path(path: str) -> int | None:
    """Return N if ``path`` resolves to ``/proc/self/fd/N``: reopening that path would lose the file position."""
    own, visited = os.path.realpath("/proc/self/fd"), set[str]()
    while path not in visited:
        visited.add(path)
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) == own:
            return int(name)
        if os.path.islink(path):
            path = os.path.join(folder, os.readlink(path))
    return None


def _create_locked_file(prefix: str, mode: int) -> tuple[int, str]:
    """Create and lock a file; return its descriptor and its name, which is empty for an unnamed file."""
    if os.path.isdir("/proc/self/fd"):
        with suppress(OSError):  # unsupported by older and some network file systems
            descriptor = os.open(os.path.dirname(prefix) or ".", os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, mode)
            with suppress(OSError):
                _lock_file(descriptor)
            return descriptor, ""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        path = f"{prefix}{os.urandom(6).hex()}"
        descriptor = _lock_new_file(os.open(path, flags, mode))
        if descriptor >= 0:
            return descriptor, path


def _lock_new_file(descriptor: int) -> int:
    """Lock ``descriptor`` and return it; -1 if another process had removed the file as stale before it was locked."""
    try:
        _lock_file(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor
    except OSError as error:
        if error.errno != EAGAIN:  # a file system without locks: its stale files remain
            return descriptor
    os.close(descriptor)
    return -1


def _remove_unlocked(path: str) -> None:
    """Remove a temporary file or folder of this user if it is not locked."""
    from shutil import rmtree

    with suppress(OSError):
        info = os.lstat(path)
        folder = stat.S_ISDIR(info.st_mode)
        if info.st_uid != os.geteuid() or not (folder or stat.S_ISREG(info.st_mode)):
            return
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            _lock_file(descriptor)
            rmtree(path, ignore_errors=True) if folder else os.unlink(path)
        finally:
            os.close(descriptor)


def _lock_file(descriptor: int) -> None:
    """Lock a file, or raise OSError at once."""
    from fcntl import LOCK_EX, LOCK_NB, flock  # not needed by a process that only loads

    flock(descriptor, LOCK_EX | LOCK_NB)
