"""``aotc sign``: sign a bundle, or generate a key pair."""

from __future__ import annotations

from pathlib import Path

import typer

SUMMARY = "Sign a bundle, or make a pair of keys."
EXAMPLES = """
aotc sign --new-key me.key

aotc sign model.vmfb --key me.key

aotc verify model.vmfb --trusted-key me.key.pub
"""


def command(
    bundle: Path | None = typer.Argument(None, help="The .vmfb file."),
    key: str = typer.Option("", help="A private Ed25519 key, a PEM file."),
    output: str = typer.Option("", "-o", "--output", help="Write the signed bundle here; default: in place."),
    new_key: str = typer.Option("", "--new-key", help="Write a private key to this file, its public key to FILE.pub."),
) -> None:
    """Sign every byte of a bundle with Ed25519; `aotc.load(..., trusted_keys=[...])` then runs no other."""
    from aotc.tools import sign

    if not new_key and not (bundle and key):
        raise typer.BadParameter("a bundle and --key, or --new-key")
    if new_key:
        print(f"{new_key}: private, keep it; {sign.new_key(new_key)}: public, for trusted_keys")
    if bundle is not None:
        sign.sign_bundle(str(bundle), key or new_key, output)
        print(f"{output or bundle}: signed")
