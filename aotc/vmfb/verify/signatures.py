"""Which bundles may run: those that a key has signed, or whose source is compiled here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError

# Imported when keys are given, or a bundle is not trusted: a runtime does without the library and the compiler.
SIGNATURES, COMPILER = "aotc.tools.sign", "aotc.recompile"


def trusted(
    bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None, keys: Sequence[Any] | None,
    untrusted: bool,
) -> tuple[OpenedBundle, bool]:  # fmt: skip
    """Return the bundle whose code may run, and whether it is signed; then all of it has been compared."""
    approve = None if keys is None else import_module(SIGNATURES).approval(keys)
    try:
        if approve is not None:
            bundle.verify_all()
            bundle.signer = approve(bundle)
            return bundle, True
    except BundleError:
        if not untrusted:
            raise
    return _compiled_here(bundle, devices) if untrusted else bundle, False


def check_keys(keys: Sequence[Any]) -> None:
    """Read public keys, for callers that load bundles later.

    Raises
    ------
    BundleError
        If one cannot be read.
    """
    import_module(SIGNATURES).approval(keys)


def _compiled_here(bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None) -> OpenedBundle:
    """Return the source of a bundle, compiled."""
    try:
        compiler = import_module(COMPILER)
    except ImportError as error:
        what = f"code of a bundle that is not trusted never runs, and its source cannot be compiled: {error}"
        from aotc.vmfb.host.install import install_command  # imports importlib.metadata: for this error alone

        hint = f"{install_command('compile')}, or trusted_keys=[...] for a bundle that is signed"
        raise BundleError(bundle.where, what, hint=hint) from None
    return compiler.recompiled(bundle, devices)
