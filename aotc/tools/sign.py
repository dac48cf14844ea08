"""Ed25519 signatures of bundles: the signed header contains the digest of the manifest, which covers every segment.

Keys are PEM files in the format of openssl.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from aotc.vmfb.bundle import OpenedBundle, open_bundle, signed_bundle_pieces, write_bundle_file
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.install import install_command

KEY_BYTES = 32


def _import_ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise BundleError("", f"signatures need cryptography: {error}", hint=install_command("sign")) from None
    return ed25519


def new_key(path: str) -> str:
    """Write a private key to ``path`` and its public key to ``path.pub``; return the path of the public key.

    Raises
    ------
    BundleError
        If a file exists, or cannot be written.
    """
    key = _import_ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives import serialization as form

    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    for name, data, mode in ((path, private, 0o600), (f"{path}.pub", public, 0o644)):
        try:
            with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
                f.write(data)
        except (OSError, ValueError) as error:
            hint = "another name: a key is not replaced"
            raise BundleError(name, f"cannot write the key: {error}", hint=hint) from None
    return f"{path}.pub"


def sign_bundle(path: str, key: str, output: str = "") -> None:
    """Sign the bundle at ``path`` with a private key file, in place unless ``output`` is given.

    Raises
    ------
    BundleError
        If the bundle is damaged, or the key cannot be read.
    """
    private = _private_key(key)
    opened = open_bundle(path)
    opened.verify_all()
    public = private.public_key().public_bytes_raw()
    write_bundle_file(output or path, signed_bundle_pieces(opened, lambda message: (public, private.sign(message))))


def signature_verifier(trusted: Sequence[str | os.PathLike[str] | bytes]) -> Callable[[OpenedBundle], bytes]:
    """Return a callback for the loader that refuses bundles not signed by one of the ``trusted`` public keys.

    Raises
    ------
    BundleError
        If a key cannot be read.
    """
    if isinstance(trusted, str | bytes | os.PathLike) or not isinstance(trusted, Sequence) or not trusted:
        raise BundleError("", "trusted_keys are no keys", repr(trusted)[:100], "a list of public keys")
    keys = {_public_key(key) for key in trusted}

    def approve(opened: OpenedBundle) -> bytes:
        """Return the key of a valid signature; refuse a missing, untrusted or wrong one."""
        from cryptography.exceptions import InvalidSignature

        if opened.signature is None:
            raise BundleError(opened.where, "the bundle is not signed", hint="aotc sign --key")
        key, signature, message = opened.signature
        if key not in keys:
            raise BundleError(
                opened.where, "the bundle is signed with a key that is not trusted", key.hex(),
                ", ".join(sorted(k.hex() for k in keys)),
            )  # fmt: skip
        try:
            _import_ed25519().Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise BundleError(opened.where, "the signature is wrong", hint="do not run this bundle") from None
        return key

    return approve


def _private_key(path: str) -> Any:
    """Read an Ed25519 private key from a PEM file."""
    kind = _import_ed25519().Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _key_file_bytes(path)
    if _PUBLIC_MARK in data:
        hint = f"the private key: {path.removesuffix('.pub')}"
        raise BundleError(path, "this is a public key, and a private key signs", hint=hint)
    try:
        found = load_pem_private_key(data, None)
    except (ValueError, TypeError) as error:
        raise BundleError(path, f"cannot read the private key: {error}", hint=_PRIVATE_HINT) from None
    if not isinstance(found, kind):
        raise BundleError(path, "the key is of another kind", type(found).__name__, "Ed25519")
    return found


def _public_key(key: str | os.PathLike[str] | bytes) -> bytes:
    """Return the 32 bytes of a public key, given as a PEM file, PEM data, or hexadecimal digits."""
    kind = _import_ed25519().Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if not isinstance(key, str | bytes | os.PathLike):
        raise BundleError("", f"a trusted key is a {type(key).__name__}", hint=_PUBLIC_HINT)
    where = "" if isinstance(key, bytes) else os.fsdecode(key)
    if isinstance(key, str) and not os.path.exists(key) and _HEX_DIGITS.fullmatch(key):
        if len(key) != 2 * KEY_BYTES:
            expected = f"{2 * KEY_BYTES} hexadecimal digits, or the path of a .pub file"
            raise BundleError(key[:100], "wrong length of a public key", f"{len(key)} digits", expected)
        return bytes.fromhex(key)
    data = key if isinstance(key, bytes) else _key_file_bytes(where)
    if _PRIVATE_MARK in data:
        hint = f"its public key: {where}.pub" if where else _PUBLIC_HINT
        raise BundleError(where, "this is a private key, and a public key verifies", hint=hint)
    try:
        found = load_pem_public_key(data)
    except (ValueError, TypeError) as error:
        raise BundleError(where, f"cannot read the public key: {error}", hint=_PUBLIC_HINT) from None
    if not isinstance(found, kind):
        raise BundleError(where, "the key is of another kind", type(found).__name__, "Ed25519")
    return found.public_bytes_raw()


_PRIVATE_MARK, _PUBLIC_MARK = b"PRIVATE KEY-----", b"PUBLIC KEY-----"
_HEX_DIGITS = re.compile("[0-9a-fA-F]+")
_PRIVATE_HINT = "a file that aotc sign --new-key wrote"
_PUBLIC_HINT = "the .pub file that aotc sign --new-key wrote, or the 64 hexadecimal digits of aotc inspect"


def _key_file_bytes(path: str) -> bytes:
    """Read the file of a key.

    Raises
    ------
    BundleError
        If the file is missing or cannot be read.
    """
    try:
        with open(path, "rb") as f:
            return f.read()
    except FileNotFoundError:
        own = path.removesuffix(".pub")
        hint = f"aotc sign --new-key={own}, which writes both keys" if path != own else ""
        raise BundleError(path, "there is no such file", hint=hint) from None
    except OSError as error:
        raise BundleError(path, f"cannot read the key: {error.strerror}") from None
    except ValueError as error:  # not a valid path
        raise BundleError(repr(path)[:100], f"cannot read the key: {error}") from None
