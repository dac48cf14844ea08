"""Trust in bundles: verification of signatures, and compilation of an untrusted bundle's source.

:func:`aotc.tools.sign.signature_verifier` makes the function that verifies a signature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.device import import_extra
from aotc.vmfb.errors import BundleError


def select_trusted_bundle(
    bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None, keys: Sequence[Any] | None,
    untrusted: bool,
) -> tuple[OpenedBundle, bool]:  # fmt: skip
    """Return the bundle whose code may run, and True if a trusted key signed it and all its digests were verified.

    Without such a signature that is an error, or with ``untrusted`` a bundle compiled here from the source of
    ``bundle``.
    """
    approve = None if keys is None else import_extra("sign").signature_verifier(keys)
    try:
        if approve is not None:
            bundle.verify_all()
            bundle.signer = approve(bundle)
            return bundle, True
    except BundleError:
        if not untrusted:
            raise
    return _compile_source(bundle, devices) if untrusted else bundle, False


def check_public_keys(keys: Sequence[Any]) -> None:
    """Check that all public keys can be parsed, before a bundle is loaded.

    Raises
    ------
    BundleError
        If a key cannot be parsed.
    """
    import_extra("sign").signature_verifier(keys)


def _compile_source(bundle: OpenedBundle, devices: str | Sequence[str] | Mapping[str, str] | None) -> OpenedBundle:
    """Compile the source that a bundle contains, and return the new bundle."""
    try:
        compiler = import_extra("compile")
    except ImportError as error:
        what = f"code of a bundle that is not trusted never runs, and its source cannot be compiled: {error}"
        from aotc.vmfb.host.install import install_command  # imports importlib.metadata: only for this error

        hint = f"{install_command('compile')}, or trusted_keys=[...] for a bundle that is signed"
        raise BundleError(bundle.where, what, hint=hint) from None
    return compiler.recompile_untrusted(bundle, devices)
