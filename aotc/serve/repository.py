"""Repository of served models: one bundle, or a folder of bundles with versions; updates lose no requests.

``NAME.vmfb`` is version 1 of ``NAME``, ``NAME/7/model.vmfb`` version 7. A changed file is loaded next to the old
version, which it replaces when it is ready; running requests finish on the old one. A file that cannot be loaded
changes only the reported state.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from errno import ELOOP
from logging import Logger
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

from aotc.serve.background_threads import run_in_background
from aotc.serve.errors import BAD, CLOSED, NOT_FOUND, RequestFault, shown_value
from aotc.serve.model import FileStamp, ServedModel
from aotc.serve.settings import Settings
from aotc.vmfb.errors import BundleError, CallError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")
_BUNDLE, _END = "model.vmfb", ".vmfb"
Place = tuple[str, int]  # name and version
File = tuple[str, FileStamp, str]  # path, state, and the link target if that is outside of the folder
Versions = Mapping[int, ServedModel]


class Repository:
    """The served models of a folder, or of one file.

    Attributes
    ----------
    models : mapping of str to mapping of int to ServedModel
        The served models by name and version; replaced as a whole, never modified.
    failures : dict of (str, int) to (FileStamp, str)
        Versions that cannot be loaded, with the reason.
    unreadable : dict of str to str
        Models whose files cannot be accessed, with the reason; loaded versions of them are still served.
    trouble : str
        The reason if the folder cannot be read, else ""; loaded models are still served.
    """

    def __init__(self, settings: Settings, log: Logger, loaded: Callable[[ServedModel], None]) -> None:
        self.models: Mapping[str, Versions] = {}
        self.failures: dict[Place, tuple[FileStamp, str]] = {}
        self.unreadable: dict[str, str] = {}
        self.trouble = ""
        self._settings, self._log, self._loaded = settings, log, loaded
        self._one = not settings.source.is_dir()
        self._unloaded: set[str] = set()
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------ lookups

    def find(self, name: str, version: str = "") -> tuple[ServedModel, str]:
        """Return the model and the function name of a request; ``llm.decode`` is function ``decode`` of ``llm``.

        Raises
        ------
        RequestFault
            If there is no such name or version.
        """
        versions, function = self.models.get(name), ""
        if versions is None:
            model, _, function = name.rpartition(".")
            versions = self.models.get(model)
        if not versions:
            there = ", ".join(self.models)[:400] or "none yet"
            raise RequestFault(NOT_FOUND, name[:80], "no such model", expected=there)
        if not version:
            return versions[max(versions)], function
        found = versions.get(int(version)) if _VERSION.match(version) else None
        if found is None:
            there = ", ".join(map(str, sorted(versions)))
            raise RequestFault(NOT_FOUND, name[:80], "no such version of the model", version[:40], there)
        return found, function

    def all_functions(self) -> list[tuple[ServedModel, str]]:
        """Return each version of each model with each function name that requests may use; "" is the default."""
        return [
            (model, function)
            for versions in self.models.values()
            for _, model in sorted(versions.items())
            for function in model.names()
        ]

    def versions(self, model: ServedModel) -> list[int]:
        """Return the versions of a model, in order."""
        return sorted(self.models.get(model.name, ()))

    def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Return the protocol's repository index: a row for each served or unavailable version."""
        rows = [
            {"name": name, "version": str(v), "state": "READY", "reason": self.unreadable.get(name, "")}
            for name, versions in self.models.items()
            for v in sorted(versions)
        ]
        there = {(row["name"], row["version"]): row for row in rows}
        for (name, version), (_, reason) in self.failures.items():
            row = there.get((name, str(version)))
            if row is not None:
                row["reason"] = f"a newer file cannot be loaded: {reason}"
            elif not ready:
                rows.append({"name": name, "version": str(version), "state": "UNAVAILABLE", "reason": reason})
        if not ready:
            gone = {n: why for n, why in self.unreadable.items() if n not in self.models}
            gone |= dict.fromkeys(sorted(self._unloaded), "unloaded")
            rows += [{"name": name, "state": "UNAVAILABLE", "reason": why} for name, why in gone.items()]
        return rows

    # ------------------------------------------------------------ changes

    def end_ranks(self) -> None:
        """End the processes of sharded models, when the server ends."""
        for versions in self.models.values():
            for model in versions.values():
                with suppress(Exception):  # the others are to end, too
                    model.end_ranks()

    async def load(self, name: str) -> None:
        """Load a model of the folder, or reload a changed one.

        Raises
        ------
        RequestFault
            If the model does not exist or cannot be loaded.
        """
        self._check_name(name)
        self._unloaded.discard(name)
        await self.refresh(name)
        reasons = [reason for (n, _), (_, reason) in self.failures.items() if n == name]
        if reasons:
            raise RequestFault(BAD, name, "the model cannot be loaded", reasons[0])
        if name not in self.models:
            raise RequestFault(NOT_FOUND, name, "there is no such model in the folder", expected=f"{name}{_END}")

    async def unload(self, name: str) -> None:
        """Stop serving a model until it is loaded again; running requests are finished.

        Raises
        ------
        RequestFault
            If the model is not served.
        """
        self._check_name(name)
        async with self._lock:
            if name not in self.models:
                raise RequestFault(NOT_FOUND, name, "no such model", expected=", ".join(self.models)[:400] or "none")
            self._unloaded.add(name)
            self.models = {n: versions for n, versions in self.models.items() if n != name}
            self._log.info("unloaded", extra={"fields": {"model": name}})

    async def refresh(self, only: str = "") -> None:
        """Scan the folder: load new files, drop models whose files are gone.

        Raises
        ------
        RequestFault
            If the folder cannot be read; then nothing changes.
        """
        async with self._lock:
            try:
                found, unreadable = await run_in_background(self._scan)
            except OSError as error:
                self._scan_periodically(f"{error.strerror or error}: {error.filename or self._settings.source}")
                raise RequestFault(CLOSED, "", "the folder of models cannot be read", self.trouble) from None
            self._scan_periodically("")
            for name, reason in unreadable.items():
                if self.unreadable.get(name) != reason:
                    self._log.error("cannot be read", extra={"fields": {"model": name, "error": reason}})
            self.unreadable = unreadable
            there = dict(found)
            if self._one and not there:
                return  # between two renames, or gone for good: the loaded model is still served
            self.failures = {p: f for p, f in self.failures.items() if p in there}
            for place, file in there.items():
                if place[0] not in self._unloaded and only in ("", place[0]):
                    await self._load_changed_file(place, file, again=bool(only))
            self._drop_removed_models({place for place in there if place[0] not in self._unloaded})

    def check_bundle_loaded(self) -> None:
        """Refuse to start if the source is a single bundle that could not be loaded.

        Raises
        ------
        CallError
            If the only bundle is not loaded.
        """
        if self._one and not self.models:
            reasons = [reason for _, reason in self.failures.values()]
            raise CallError("", reasons[0] if reasons else f"{self._settings.source} has gone")

    def _scan_periodically(self, trouble: str) -> None:
        if trouble and trouble != self.trouble:
            self._log.error("the folder cannot be read", extra={"fields": {"error": trouble}})
        self.trouble = trouble

    async def watch(self) -> None:
        """Scan the folder periodically."""
        while self._settings.poll:
            await asyncio.sleep(self._settings.poll)
            with suppress(RequestFault):  # already logged
                await self.refresh()

    async def _load_changed_file(self, place: Place, file: File, again: bool) -> None:
        """Load a new or changed file.

        A file that failed before is loaded only if it has changed since, or with ``again``.
        """
        name, version = place
        path, stamp, outside = file
        current = self.models.get(name, {}).get(version)
        failed = self.failures.get(place)
        if current is not None and current.stamp == stamp:
            return
        if failed is not None and not again and (failed[0], failed[0].touched) == (stamp, stamp.touched):
            return
        about = {"model": name, "version": version, "path": path}
        try:
            if outside:
                raise BundleError(path, "a link leads out of the folder", outside)
            model = await run_in_background(
                lambda: ServedModel(name, version, path, stamp, self._settings, not self._one)
            )
        except Exception as error:
            expected = isinstance(error, BundleError | CallError | OSError | MemoryError)
            reason = str(error) if expected and str(error) else f"{type(error).__name__}: {error}"
            passing = isinstance(error, OSError | MemoryError)  # of the machine, not of the file: retried at each scan
            self.failures[place] = replace(stamp, touched=-1) if passing else stamp, reason
            if failed is None or failed[1] != reason:
                self._log.error("cannot load", extra={"fields": {**about, "error": reason}}, exc_info=not expected)
            return
        self.failures.pop(place, None)
        self._loaded(model)
        self.models = {**self.models, name: {**self.models.get(name, {}), version: model}}
        self._log.info("loaded" if current is None else "replaced", extra={"fields": about})

    def _drop_removed_models(self, there: set[Place]) -> None:
        """Stop serving versions that are not among ``there``, the bundles of the last scan."""
        kept = {
            n: {v: m for v, m in versions.items() if (n, v) in there or n in self.unreadable}
            for n, versions in self.models.items()
        }
        gone = [(n, v) for n, versions in self.models.items() for v in versions if v not in kept[n]]
        if gone:
            self.models = {n: versions for n, versions in kept.items() if versions}
            for name, version in gone:
                self._log.info("gone", extra={"fields": {"model": name, "version": version}})

    # ------------------------------------------------------------ the folder

    def _check_name(self, name: str) -> None:
        if not _NAME.match(name):
            raise RequestFault(BAD, "", "this is not a model name", shown_value(name), "letters, digits, . _ -")

    def _scan(self) -> tuple[list[tuple[Place, File]], dict[str, str]]:
        """Return each bundle with its resolved file, and the models that cannot be accessed."""
        source = self._settings.source
        root = os.path.realpath(source)
        found, unreadable = [], {}
        for name, entry in [(source.stem, source)] if self._one else folder_entries(source):
            try:
                for place, path in [((name, 1), source)] if self._one else bundles_of_entry(name, entry):
                    real = os.path.realpath(path)
                    outside = not self._one and os.path.commonpath([root, real]) != root
                    if outside:
                        info = os.lstat(path)
                    else:
                        info = os.stat(real) if self._one else stat_inside(root, real)
                    stamp = FileStamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
                    found.append((place, (str(path) if outside else real, stamp, real if outside else "")))
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                unreadable[name] = f"{error.strerror}: {error.filename}"
        return found, unreadable


def stat_inside(root: str, path: str) -> os.stat_result:
    """Return the status of a file in a folder; refuse links created since its path was resolved.

    Raises
    ------
    OSError
        If the file is reached through a link, or has been removed.
    """
    *folders, name = os.path.relpath(path, root).split(os.sep)
    place = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            os.close(place)
            place = inner
        info = os.stat(name, dir_fd=place, follow_symlinks=False)
    finally:
        os.close(place)
    if not S_ISREG(info.st_mode):
        raise OSError(ELOOP, "a link was put in the place of the file", path)
    return info


def folder_entries(source: Path) -> Iterator[tuple[str, Path]]:
    """Yield the entries of a folder whose names are valid for a bundle or a folder of versions."""
    for entry in sorted(source.iterdir()):
        name = entry.stem if entry.name.endswith(_END) else entry.name
        if _NAME.match(name):
            yield name, entry


def bundles_of_entry(name: str, entry: Path) -> Iterator[tuple[Place, Path]]:
    """Yield the bundles of one entry: the bundle itself, or each version in the folder."""
    kind = os.stat(entry).st_mode
    if entry.name.endswith(_END):
        if S_ISREG(kind):
            yield (name, 1), entry
    elif S_ISDIR(kind):
        for version in sorted(entry.iterdir()):
            bundle = version / _BUNDLE
            with suppress(FileNotFoundError, NotADirectoryError):
                if _VERSION.match(version.name) and S_ISREG(os.stat(bundle).st_mode):
                    yield (name, int(version.name)), bundle
