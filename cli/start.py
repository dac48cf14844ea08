"""Entry point of the ``aotc`` command; an interrupt during its imports ends it like a later one."""

from __future__ import annotations

import gc
import os
import sys
from typing import NoReturn

from aotc_cli.shared.interrupt import end_interrupted


def main() -> None:
    """Run the command line and exit."""
    os.environ.setdefault("NUMBA_DISABLE_INTEL_SVML", "1")  # bundles lack its functions: aotc.kernels.jobs.objects
    try:
        from aotc_cli.main import main as run
    except KeyboardInterrupt:
        end_interrupted()
    except ModuleNotFoundError as error:
        if (error.name or "aotc").partition(".")[0].startswith("aotc"):
            raise
        _report_missing_package(error.name)
    try:
        run()
    finally:
        gc.freeze()  # else Python searches all imported packages for garbage at exit; the system frees their memory


def _report_missing_package(package: str | None) -> NoReturn:
    """Report a missing package of the command line, for example after an installation without dependencies."""
    from aotc.vmfb.host.install import install_command

    print(f"error: the aotc command needs {package}, which is not installed", file=sys.stderr)
    print(f"  try: {install_command()}; aotc.load in Python needs NumPy and msgpack alone", file=sys.stderr)
    sys.exit(1)
