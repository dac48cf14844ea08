"""aotc: an ahead-of-time compiler for JAX and StableHLO.

``aotc.compile`` creates a bundle, ``aotc.load`` loads one, ``aotc.upgrade`` compiles one again. Names are imported on
first use, so loading a bundle does not import the compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from aotc.bundle import Bundle
    from aotc.diagnostics import AotcWarning, CompileError, InternalError
    from aotc.options import Options
    from aotc.pipeline import compile
    from aotc.recompile import upgrade
    from aotc.serve.asgi import asgi
    from aotc.tools.bench import bench
    from aotc.tools.check_model import check
    from aotc.tools.explain.explain import explain
    from aotc.tools.inspect import inspect
    from aotc.tools.lint import lint
    from aotc.tools.page.build import report
    from aotc.tools.page.compare import diff
    from aotc.tools.profile import profile
    from aotc.tools.tune import tune
    from aotc.vmfb.custom_calls import register_custom_call
    from aotc.vmfb.devices.array import DeviceArray
    from aotc.vmfb.errors import (
        ArgumentError,
        ArgumentValueError,
        BundleError,
        BundleNotFoundError,
        CallError,
        DeadlineExceeded,
        Error,
        FenceCancelled,
        RankLost,
    )
    from aotc.vmfb.errors import (
        VmError as VmError,
    )
    from aotc.vmfb.gang.gang import gang
    from aotc.vmfb.module import LoadedModule, load
    from aotc.vmfb.ranks.ranks import Ranks
    from aotc.vmfb.submit.fence import Fence
    from aotc.vmfb.weights.shards import shard_weights

__version__ = "0.1.0"

_ERRORS = "aotc.vmfb.errors"
_HOMES = {
    "AotcWarning": "aotc.diagnostics",
    "ArgumentError": _ERRORS,
    "ArgumentValueError": _ERRORS,
    "Bundle": "aotc.bundle",
    "BundleError": _ERRORS,
    "BundleNotFoundError": _ERRORS,
    "CallError": _ERRORS,
    "CompileError": "aotc.diagnostics",
    "DeadlineExceeded": _ERRORS,
    "DeviceArray": "aotc.vmfb.devices.array",
    "Error": _ERRORS,
    "Fence": "aotc.vmfb.submit.fence",
    "FenceCancelled": _ERRORS,
    "InternalError": "aotc.diagnostics",
    "LoadedModule": "aotc.vmfb.module",
    "Options": "aotc.options",
    "RankLost": _ERRORS,
    "Ranks": "aotc.vmfb.ranks.ranks",
    "asgi": "aotc.serve.asgi",
    "bench": "aotc.tools.bench",
    "check": "aotc.tools.check_model",
    "compile": "aotc.pipeline",
    "diff": "aotc.tools.page.compare",
    "explain": "aotc.tools.explain.explain",
    "gang": "aotc.vmfb.gang.gang",
    "inspect": "aotc.tools.inspect",
    "lint": "aotc.tools.lint",
    "load": "aotc.vmfb.module",
    "profile": "aotc.tools.profile",
    "register_custom_call": "aotc.vmfb.custom_calls",
    "report": "aotc.tools.page.build",
    "shard_weights": "aotc.vmfb.weights.shards",
    "tune": "aotc.tools.tune",
    "upgrade": "aotc.recompile",
}
_RENAMED = {"VmError": "CallError"}

__all__ = [
    "AotcWarning",
    "ArgumentError",
    "ArgumentValueError",
    "Bundle",
    "BundleError",
    "BundleNotFoundError",
    "CallError",
    "CompileError",
    "DeadlineExceeded",
    "DeviceArray",
    "Error",
    "Fence",
    "FenceCancelled",
    "InternalError",
    "LoadedModule",
    "Options",
    "RankLost",
    "Ranks",
    "__version__",
    "asgi",
    "bench",
    "check",
    "compile",
    "diff",
    "explain",
    "gang",
    "inspect",
    "lint",
    "load",
    "profile",
    "register_custom_call",
    "report",
    "shard_weights",
    "tune",
    "upgrade",
]


def __dir__() -> list[str]:
    return sorted(__all__)


if not TYPE_CHECKING:  # a type checker would take any name

    def __getattr__(name: str) -> Any:
        """Import a public name on first use; an old name of a renamed function warns."""
        from importlib import import_module

        current = _RENAMED.get(name, name)
        if current not in _HOMES:
            raise AttributeError(f"module 'aotc' has no attribute {name!r}")
        value = getattr(import_module(_HOMES[current]), current)
        if current != name:
            from warnings import warn

            warn(f"aotc.{name} is called aotc.{current} now", DeprecationWarning, stacklevel=2)
        else:
            globals()[name] = value
        return value
