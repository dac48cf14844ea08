"""Adapters of the engines for ``benchmarks models engines``.

An adapter is a module with ``MODULE`` (the name of the required package) and ``INSTALL`` (for pip). ``prepare(name,
folder, precision)`` compiles a model of a folder and returns seconds and bytes. ``load(folder, inputs, facts, threads,
precision)`` returns a call of it and, if results are not NumPy's, their conversion.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from benchmarks.peers import available

Loaded = tuple[Callable[[], Any], Callable[[Any], list[Any]] | None]
BF16_TOLERANCE = 0.1  # allowed error of an engine that computes in bf16 a model of f32
ENGINES = {  # name: adapter and precision
    "xla": ("xla", ""), "aotc": ("aotc", ""), "aotc_bf16": ("aotc", "bf16"), "iree": ("iree", ""),
    "onnxruntime": ("onnxruntime", ""), "openvino": ("openvino", "f32"), "openvino_bf16": ("openvino", "bf16"),
}  # fmt: skip


def adapter(engine: str) -> tuple[Any, str]:
    """Return the adapter module and the precision of an engine.

    Raises
    ------
    SystemExit
        If there is no engine of this name.
    """
    if engine not in ENGINES:
        raise SystemExit(f"--against: found {engine!r}, expected {', '.join(ENGINES)}")
    name, precision = ENGINES[engine]
    return importlib.import_module(f"benchmarks.peers.{name}"), precision


def installed(engines: list[str]) -> list[str]:
    """Return the engines that are installed; report the others."""
    return [e for e in engines if available(adapter(e)[0].MODULE, adapter(e)[0].INSTALL)]
