"""``aotc verify``: check every byte of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Compare every segment with its sha256, check programs and command buffers, and load the bundle.

    One that is for GPUs alone is checked as far as can be where there is no driver.
    """
    import aotc
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.safety.check_bundle import check_bundle

    opened = open_bundle(str(bundle))
    opened.verify_all()
    count = len(opened.manifest["segments"])
    if missing := _missing_driver(opened.manifest["variants"]):
        if trusted_key:
            from aotc.tools.sign import approval

            approval(trusted_key)(opened)
        check_bundle(bundle.read_bytes())
        print(f"{bundle}: ok, {count} segments match their sha256, and all variants are whole; not run here: {missing}")
        return
    register_from(custom_calls)
    module = aotc.load(str(bundle), verify=True, trusted_keys=trusted_key or None)
    print(f"{bundle}: ok, {count} segments match their sha256; runs here as {module.stats()['target']}")


def _missing_driver(variants: list[dict[str, Any]]) -> str:
    """Return why no variant can be loaded that is for GPUs, if all are."""
    from aotc.vmfb.devices import driver

    return driver.missing() if all(v["kind"] in ("cuda", "mix") for v in variants) else ""
