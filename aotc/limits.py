"""Thresholds of the bundle cache, of ``aotc check`` and of the command line. Each has its unit, why, and its source."""

from __future__ import annotations

# ---------------------------------------------------------------- the bundle cache

WORTH_SECONDS = 0.5
"""unit: seconds of a compilation
why: only what took longer is kept: a bundle that is made as quickly as it is read need not be on disk
from: chosen, not measured
"""

CHUNK_BYTES = 1 << 20
"""unit: bytes, or characters
why: so much of a model's text is hashed at a time: to encode all at once would double a large model in memory
from: chosen, not measured
"""

# ---------------------------------------------------------------- options

MOST_PROCESSES = 256
"""unit: compiler processes or threads
why: a process takes 200 MB; ten thousand asked for by mistake would take all memory
from: chosen, not measured
"""

# ---------------------------------------------------------------- reports of failures

KEPT_REPORTS = 8
"""unit: folders
why: so many older ones stay beside a new report: enough for the failures of one session of work
from: chosen, not measured
"""

# ---------------------------------------------------------------- aotc check

MOST_ITERATIONS = 256
"""unit: iterations of a loop that differs
why: so many are looked into for the op that differs, each by the reference: seconds, not hours
from: chosen, not measured
"""

AMPLIFIED = 4.0
"""unit: times the reference's own error
why: a result so near to that of higher precision is as good as the reference, though the two differ
from: chosen, not measured
"""

# ---------------------------------------------------------------- the command line

MOST_BYTES = (1 << 63) - 1
"""unit: bytes of a limit
why: bundles and kernels hold sizes in 64 bits
from: the format
"""

MOST_TRIES = 20000
"""unit: combinations of sizes
why: so many are tried for a model that says which of its sizes are wrong only by refusing them
from: chosen, not measured
"""

SHOWN_LINES = 3
"""unit: places of an op in the table of aotc lint
why: the others are counted: a row should stay one line
from: chosen, not measured
"""
