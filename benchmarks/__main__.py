"""Entry of the benchmarks: ``python -m benchmarks [TOPIC [SUITE] [OPTIONS]]``."""

from __future__ import annotations

import os
import sys

from benchmarks.suites import application, listing, parse


def main(words: list[str]) -> None:
    """List the suites, or run one, as the command line ``words`` says."""
    if not words or words[0] in ("--help", "-h"):
        print("\n".join(listing()))
        return
    topic, name, options = parse(words)
    if options == words[1:] and set(options) & {"--help", "-h"}:
        print("\n".join(listing((topic,))))
        print(f"\nOptions of {topic} {name}:")
    set_environment(topic, options)
    application(topic, name)(options, prog_name=f"python -m benchmarks {topic} {name}")


def set_environment(topic: str, options: list[str]) -> None:
    """Set the environment variables that JAX reads at import: suites without a GPU run it on the CPU."""
    if topic == "gpu" or any("cuda" in word for word in options):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


if __name__ == "__main__":
    main(sys.argv[1:])
