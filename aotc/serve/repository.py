"""The models that are served: one bundle, or a folder of them with versions; replaced by renaming, no request lost.

``NAME.vmfb`` is version 1 of ``NAME``, ``NAME/7/model.vmfb`` version 7. A new state of a file is loaded beside the old
one, and takes its place when it is ready; requests under way keep the old one until they end. A file that cannot be
loaded changes nothing but what is said of it.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from logging import Logger
from pathlib import Path
from typing import Any

from aotc.serve.faults import BAD, NOT_FOUND, RequestFault
from aotc.serve.limits import REPORTED_FAILURES
from aotc.serve.model import ServedModel, Stamp
from aotc.serve.settings import Settings
from aotc.vmfb.errors import BundleError, VmError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,127}\Z")
_VERSION = re.compile(r"[1-9][0-9]{0,17}\Z")
_BUNDLE, _END = "model.vmfb", ".vmfb"
Place = tuple[str, int]  # name and version
File = tuple[str, Stamp, str]  # its path, its state, and where it leads to if that is outside
Versions = Mapping[int, ServedModel]


class Repository:
    """The models of a folder, or of one file.

    Attributes
    ----------
    models : mapping of str to mapping of int to ServedModel
        What is served now: replaced as a whole, never changed.
    failures : dict of (str, int) to (Stamp, str)
        What cannot be loaded, and why.
    """

    def __init__(self, settings: Settings, log: Logger, loaded: Callable[[ServedModel], None]) -> None:
        self.models: Mapping[str, Versions] = {}
        self.failures: dict[Place, tuple[Stamp, str]] = {}
        self._settings, self._log, self._loaded = settings, log, loaded
        self._one = not settings.source.is_dir()
        self._unloaded: set[str] = set()
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------ what requests ask

    def find(self, name: str, version: str = "") -> tuple[ServedModel, str]:
        """Return a model and the name of a function: ``llm.decode`` is ``decode`` of ``llm``, ``llm`` is its default.

        Raises
        ------
        RequestFault
            If there is none of this name or version.
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

    def versions(self, model: ServedModel) -> list[int]:
        """Return the versions of a model, in order."""
        return sorted(self.models.get(model.name, ()))

    def index(self, ready: bool = False) -> list[dict[str, Any]]:
        """Return a row for each version that is served, or cannot be, as the protocol has them."""
        rows = [
            {"name": name, "version": str(v), "state": "READY", "reason": ""}
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
            rows += [{"name": n, "state": "UNAVAILABLE", "reason": "unloaded"} for n in sorted(self._unloaded)]
        return rows

    # ------------------------------------------------------------ how it changes

    async def load(self, name: str) -> None:
        """Load a model of the folder, anew if its file has changed.

        Raises
        ------
        RequestFault
            If there is none, or it cannot be loaded.
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
        """Serve a model no more, until it is loaded again; requests under way end as they would.

        Raises
        ------
        RequestFault
            If it is not served.
        """
        self._check_name(name)
        async with self._lock:
            if name not in self.models:
                raise RequestFault(NOT_FOUND, name, "no such model", expected=", ".join(self.models)[:400] or "none")
            self._unloaded.add(name)
            self.models = {n: versions for n, versions in self.models.items() if n != name}
            self._log.info("unloaded", extra={"fields": {"model": name}})

    async def refresh(self, only: str = "") -> None:
        """Look at the folder: load what is new, drop what is gone."""
        async with self._lock:
            there = dict(await asyncio.to_thread(lambda: list(self._scan())))
            if self._one and not there:
                return  # between two names, or gone for good: what is loaded goes on
            self.failures = {p: f for p, f in self.failures.items() if p in there}
            for place, found in there.items():
                if place[0] not in self._unloaded and only in ("", place[0]):
                    await self._renew(place, found)
            self._drop({place for place in there if place[0] not in self._unloaded})

    async def watch(self) -> None:
        """Look again and again."""
        while self._settings.poll:
            await asyncio.sleep(self._settings.poll)
            try:
                await self.refresh()
            except OSError as error:
                self._log.error("the folder cannot be read", extra={"fields": {"error": str(error)}})

    async def _renew(self, place: Place, file: File) -> None:
        name, version = place
        path, stamp, outside = file
        current = self.models.get(name, {}).get(version)
        failed = self.failures.get(place)
        if (current is not None and current.stamp == stamp) or (failed is not None and failed[0] == stamp):
            return
        about = {"model": name, "version": version, "path": path}
        try:
            if outside:
                raise BundleError(path, "a link leads out of the folder", outside)
            model = await asyncio.to_thread(ServedModel, name, version, path, stamp, self._settings)
        except (BundleError, VmError, OSError, MemoryError) as error:
            if len(self.failures) < REPORTED_FAILURES or place in self.failures:
                self.failures[place] = stamp, str(error) or type(error).__name__
            self._log.error("cannot load", extra={"fields": {**about, "error": str(error)}})
            return
        self.failures.pop(place, None)
        self._loaded(model)
        self.models = {**self.models, name: {**self.models.get(name, {}), version: model}}
        self._log.info("loaded" if current is None else "replaced", extra={"fields": about})

    def _drop(self, there: set[Place]) -> None:
        kept = {n: {v: m for v, m in versions.items() if (n, v) in there} for n, versions in self.models.items()}
        gone = [(n, v) for n, versions in self.models.items() for v in versions if v not in kept[n]]
        if gone:
            self.models = {n: versions for n, versions in kept.items() if versions}
            for name, version in gone:
                self._log.info("gone", extra={"fields": {"model": name, "version": version}})

    # ------------------------------------------------------------ what is in the folder

    def _check_name(self, name: str) -> None:
        if not _NAME.match(name):
            raise RequestFault(BAD, "", "this is no name of a model", repr(name)[:80], "letters, digits, . _ -")

    def _scan(self) -> Iterator[tuple[Place, File]]:
        """Yield each bundle, with the file that it really is."""
        source = self._settings.source
        root = os.path.realpath(source)
        for place, path in [((source.stem, 1), source)] if self._one else _candidates(source):
            real = os.path.realpath(path)
            outside = not self._one and os.path.commonpath([root, real]) != root
            with suppress(OSError):  # it has gone meanwhile
                info = os.lstat(path) if outside else os.stat(real)
                stamp = Stamp(info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)
                yield place, (str(path) if outside else real, stamp, real if outside else "")


def _candidates(source: Path) -> Iterator[tuple[Place, Path]]:
    """Yield what is called as a bundle is, and is there."""
    for entry in sorted(source.iterdir()):
        if entry.name.endswith(_END) and _NAME.match(entry.stem):
            if entry.is_file():
                yield (entry.stem, 1), entry
        elif _NAME.match(entry.name) and entry.is_dir():
            for version in sorted(entry.iterdir()):
                if _VERSION.match(version.name) and (version / _BUNDLE).is_file():
                    yield (entry.name, int(version.name)), version / _BUNDLE
