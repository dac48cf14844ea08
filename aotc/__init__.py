"""aotc: an ahead-of-time compiler for JAX and StableHLO.

``aotc.compile`` creates a bundle, ``aotc.load`` loads one, ``aotc.upgrade`` compiles one again. Names are imported on
first use, so loading a bundle does not import the compiler.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "aotc.bundle",
    "compile": "aotc.pipeline",
    "load": "aotc.vmfb.module",
    "upgrade": "aotc.recompile",
    "DeviceArray": "aotc.vmfb.devices.array",
    "register_custom_call": "aotc.vmfb.custom_calls",
    "CompileError": "aotc.diagnostics",
    "InternalError": "aotc.diagnostics",
    "BundleError": "aotc.vmfb.errors",
    "VmError": "aotc.vmfb.errors",
    "DeadlineExceeded": "aotc.vmfb.errors",
    "Fence": "aotc.vmfb.submit.fence",
    "FenceCancelled": "aotc.vmfb.errors",
}

__all__ = [
    "Bundle",
    "BundleError",
    "CompileError",
    "DeadlineExceeded",
    "DeviceArray",
    "Fence",
    "FenceCancelled",
    "InternalError",
    "VmError",
    "__version__",
    "compile",
    "load",
    "register_custom_call",
    "upgrade",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aotc' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
