"""Where the ``aotc`` command begins: an interrupt while its parts are imported ends it as one later does."""

from __future__ import annotations

from aotc_cli.interrupt import end_interrupted


def main() -> None:
    """Run the command line and exit."""
    try:
        from aotc_cli.main import main as run
    except KeyboardInterrupt:
        end_interrupted()
    run()
