"""``aotc verify``: check every byte of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from aotc_cli.shared.custom_calls import HELP, register_custom_calls_from
from aotc_cli.shared.option_groups import BUNDLE_HELP, KEY_HELP

SUMMARY = "Check every byte of a bundle, and that this machine can run it."
EXAMPLES = """
Check a bundle:

aotc verify model.vmfb

Check a bundle and its signature:

aotc verify model.vmfb --trusted-key me.key.pub
"""


def command(
    bundle: Path = typer.Argument(..., metavar="BUNDLE", help=BUNDLE_HELP),
    trusted_key: list[str] = typer.Option(
        [], "--trusted-key", metavar="FILE.pub|HEX", help=KEY_HELP
    ),
    custom_calls: list[str] = typer.Option([], "--custom-calls", metavar="FILE.py", help=HELP),
) -> None:
    """Verify the sha256 of every segment, check programs and command buffers, and load the bundle.

    A bundle without code for this machine is checked as far as possible, and not loaded.
    """
    import aotc
    from aotc.vmfb.bundle import open_bundle
    from aotc.vmfb.verify.check_bundle import check_bundle

    opened = open_bundle(str(bundle))
    opened.verify_all()
    count = len(opened.manifest["segments"])
    if missing := _machine_obstacle(opened.manifest["variants"]):
        if trusted_key:
            from aotc.tools.sign import signature_verifier

            signature_verifier(trusted_key)(opened)
        check_bundle(bundle.read_bytes())
        checked = f"{count} segments match their sha256, and all variants are complete"
        print(f"{bundle}: ok, {checked}; not run here: {missing}")
        return
    register_custom_calls_from(custom_calls)
    module = aotc.load(str(bundle), verify=True, trusted_keys=trusted_key or None)
    print(f"{bundle}: ok, {count} segments match their sha256; runs here as {module.stats()['target']}")


def _machine_obstacle(variants: list[dict[str, Any]]) -> str:
    """Return the reason why this machine supports none of the variants, or an empty string."""
    from aotc.vmfb.devices.cpu import device as cpu
    from aotc.vmfb.devices.cuda import driver

    found = [cpu.obstacle(v) if v["kind"] == "cpu" else driver.missing() for v in variants]
    return "; ".join(dict.fromkeys(found)) if all(found) else ""
