"""Groups of options in the help of all commands, and help texts that several commands share."""

from __future__ import annotations

from enum import StrEnum


class Panel(StrEnum):
    """The groups of options, in the order of every help text; options without a group come first.

    A command names a group by ``rich_help_panel``.
    """

    INPUTS = "Inputs"
    RESULTS = "Results"
    COMPARISON = "Comparison"
    MEASUREMENT = "Measurement"
    CONTENT = "Content"
    NETWORK = "Network"
    ACCESS = "Access"
    TRUST = "Trust"
    MODELS = "Models"
    BATCHING = "Batching"
    SEQUENCES = "Sequences"
    TARGET = "Target"
    NUMBERS = "Numbers"
    DYNAMIC = "Dynamic shapes"
    WEIGHTS = "Weights and state"
    DEVICES = "Devices"
    TIMEOUTS = "Timeouts"
    LIMITS = "Memory limits"
    LOGS = "Logs and traces"
    DEBUG = "Debug"


BUNDLE_HELP = "The .vmfb file."
DEBUG_BUNDLE_HELP = "A .vmfb file with debug information, or a model to compile."
FUNCTION_HELP = "The function; default: main."
INPUT_HELP = "As for `aotc run`; default: random values."
DIM_HELP = "Size of a symbolic dim; others are assumed, and printed."
SEED_HELP = "Seed of the random values."
THREADS_HELP = "Threads that compute; default: all usable cores."
OPT_LEVEL_HELP = "As for `aotc compile`."
KEY_HELP = "A public key: the bundle must be signed with one of the keys that are named."
