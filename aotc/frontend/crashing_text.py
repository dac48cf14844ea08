"""Text that may crash the process that parses it: for some ops MLIR's verifiers divide by 0 or allocate gigabytes.

The patterns over-approximate: an alias, an escape or a comment may hide the critical attribute, so the op's name
decides. A child process reads text that matches (:mod:`aotc.source.reader_process`).
"""

from __future__ import annotations

import re

_CRASHES = re.compile(
    rb"all_to_all"  # the verifier divides by the number of replica groups: SIGFPE for tensor<0x1xi64>
    rb'|"[^"\n]*\\[^"\n]*"[ \t]*\('  # an op whose name has escapes may be any op
)
_LARGE_DIM = re.compile(rb"[\[,]\s*(?:0x[0-9a-fA-F]+|[0-9]{7,})\s*[],]")  # of dim_numbers: this many are allocated


def suspect_line(text: bytes) -> int:
    """Return the line, from 1, where MLIR's parser may crash or allocate without bound; 0 if there is none."""
    found = _CRASHES.search(text) or (_LARGE_DIM.search(text) if b"conv" in text else None)
    return text.count(b"\n", 0, found.start()) + 1 if found else 0
