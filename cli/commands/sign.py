"""``aotc sign``: sign a bundle, or generate a key pair."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.shared.option_groups import BUNDLE_HELP

SUMMARY = "Sign a bundle, or make a pair of keys."
EXAMPLES = """
Make a pair of keys:

aotc sign --new-key me.key

Sign a bundle:

aotc sign model.vmfb --key me.key

Verify the signature:

aotc verify model.vmfb --trusted-key me.key.pub
"""


def command(
    bundle: Path | None = typer.Argument(None, metavar="BUNDLE", help=BUNDLE_HELP),
    key: str = typer.Option("", metavar="FILE", help="A private Ed25519 key, a PEM file."),
    output: str = typer.Option("", "-o", "--output", metavar="FILE", help="The bundle to write; default: in place."),
    new_key: str = typer.Option(
        "", "--new-key", metavar="FILE", help="Write a private key to this file, its public key to FILE.pub."
    ),
) -> None:
    """Sign every byte of a bundle with Ed25519; `aotc.load(..., trusted_keys=[...])` refuses other bundles."""
    from aotc.tools import sign

    if not new_key and not (bundle and key):
        raise typer.BadParameter("a bundle and --key, or --new-key")
    if new_key:
        print(f"{new_key}: private, keep it; {sign.new_key(new_key)}: public, for trusted_keys")
    if bundle is not None:
        sign.sign_bundle(str(bundle), key or new_key, output)
        print(f"{output or bundle}: signed")
