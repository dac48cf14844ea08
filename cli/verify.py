"""``aotc verify``: check every byte of a bundle."""

from __future__ import annotations

from pathlib import Path

import typer

from aotc_cli.custom_calls import HELP, register_from

SUMMARY = "Check every byte of a bundle, and that this machine can run it."
EXAMPLES = """
aotc verify model.vmfb
"""


def command(
    bundle: Path = typer.Argument(..., help="The .vmfb file."),
    trusted_key: list[str] = typer.Option(
        [], "--trusted-key", help="A public key, as a file or 64 digits: the bundle must be signed with it."
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", help=HELP),
) -> None:
    """Compare every segment with its sha256, check programs and command buffers, and load the bundle."""
    import aotc
    from aotc.vmfb.bundle import open_bundle

    opened = open_bundle(str(bundle))
    opened.verify_all()
    register_from(custom_calls)
    module = aotc.load(str(bundle), verify=True, trusted_keys=trusted_key or None)
    count = len(opened.manifest["segments"])
    print(f"{bundle}: ok, {count} segments match their sha256; runs here as {module.stats()['target']}")
