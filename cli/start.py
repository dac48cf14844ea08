"""Where the ``aotc`` command begins: an interrupt while its parts are imported ends it as one later does."""

from __future__ import annotations

import sys
from typing import NoReturn

from aotc_cli.shared.interrupt import end_interrupted


def main() -> None:
    """Run the command line and exit."""
    try:
        from aotc_cli.main import main as run
    except KeyboardInterrupt:
        end_interrupted()
    except ModuleNotFoundError as error:
        if (error.name or "aotc").partition(".")[0].startswith("aotc"):
            raise
        _need(error.name)
    run()


def _need(package: str | None) -> NoReturn:
    """Say that a package of the command line is not there, as where aotc was installed without what it needs."""
    from aotc.vmfb.host.install import install_command

    print(f"error: the aotc command needs {package}, which is not installed", file=sys.stderr)
    print(f"  try: {install_command()}; aotc.load in Python needs NumPy and msgpack alone", file=sys.stderr)
    sys.exit(1)
