"""Source locations, and the exceptions of compilation.

``CompileError``: the input is wrong; the message is for the author of the model. ``InternalError``: aotc has a bug; the
message names the stage and a command that reproduces the failure.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from aotc.vmfb.errors import Error

_OWN_FILES = (f"{Path(__file__).parent}/", contextlib.__file__)  # of frames between a warning and the caller

JITTED = "jit("  # the first element of a whole name stack


@dataclass(frozen=True, slots=True)
class Loc:
    """A location in the model, and the metadata that JAX recorded for it.

    ``line`` and ``column`` count from 1 (0: unknown). ``name`` is JAX's name stack (``jit(loss)/add``); ``source`` is
    the user's line (``train.py:41``); ``library`` is the line of an installed package that it called, if any.
    ``inlined`` is the location of an op inside the inlined function; comparisons of locations ignore it.
    """

    path: str = ""
    line: int = 0
    column: int = 0
    name: str = ""
    source: str = ""
    library: str = ""
    inlined: Loc | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        """Return ``path:line:column``; unknown parts are left out."""
        return ":".join([self.path or "<model>", *(str(x) for x in (self.line, self.column) if x)])

    @property
    def traced_by(self) -> str:
        """Return JAX's metadata as one line, or an empty string."""
        source = f"{self.source}, in {self.library}" if self.library else self.source
        return " at ".join(x for x in (self.name, source) if x)

    def within(self, call: Loc) -> Loc:
        """Return the location of an inlined op: its function replaces a call at ``call``.

        JAX names the ops of a function relative to the function, and a cached function has no line of its caller.
        """
        absolute = self.name.startswith(JITTED) or not (self.name and call.name)
        name = self.name or call.name if absolute else f"{call.name}/{self.name}"
        own = self if self.source else call
        return Loc(self.path, self.line, self.column, name, own.source, own.library, self.inlined or self)


UNKNOWN = Loc()


# Characters of a line of the model that a message shows: a constant of weights is a single line.
SHOWN_LINE = 160
# Characters of each line of a message, and lines: attributes, types and ops that it quotes may be as long as the model.
SHOWN_MESSAGE = 640
SHOWN_LINES = 24


def shorten_message(text: str, most: int = SHOWN_MESSAGE) -> str:
    """Shorten ``text``: cut the middle of lines above ``most`` characters, and the last of many lines.

    The end of a line remains: it often states the expected value.
    """
    if len(text) <= most and text.count("\n") < SHOWN_LINES:
        return text
    lines = text.split("\n")
    shown = [x if len(x) <= most else f"{x[: most * 2 // 3]} ... {x[len(x) - most // 3 + 5 :]}" for x in lines]
    if len(lines) > SHOWN_LINES:
        shown[SHOWN_LINES - 1 :] = [f"... and {len(lines) - SHOWN_LINES + 1:,} lines more"]
    return "\n".join(shown)


@dataclass(frozen=True, slots=True)
class Finding:
    """One error: found and expected, location, snippet with a caret at column ``caret``, hint.

    ``notes`` are further locations from MLIR, such as an earlier definition of a value. Long messages and hints are
    shortened, and long snippets cut to the part around the caret.
    """

    message: str
    loc: Loc = UNKNOWN
    snippet: str = ""
    hint: str = ""
    caret: int = 0
    notes: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        """Shorten long messages and hints; cut a long snippet to the part around the caret."""
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "message", shorten_message(self.message))
        set_field(self, "hint", shorten_message(self.hint))
        if len(self.snippet) > SHOWN_LINE:
            start = max(0, self.caret - SHOWN_LINE // 2)
            set_field(self, "snippet", self.snippet[start : start + SHOWN_LINE])
            set_field(self, "caret", self.caret - start)

    def render(self) -> str:
        """Return the error as displayed: message, source line with a caret, JAX's metadata, hint."""
        text = self._lines("error")
        for note in self.notes:
            text += [f"  {line}" for line in note._lines("note")]
        if self.loc.traced_by:
            text.append(f"  traced by: {shorten_message(self.loc.traced_by)}")
        if self.hint:
            text.append(f"  try: {self.hint}")
        return "\n".join(text)

    def _lines(self, kind: str) -> list[str]:
        place = "" if self.loc == UNKNOWN else f"{self.loc}: "
        shown = [f"    {self.snippet.strip()}", f"    {' ' * self.caret}^"] if self.snippet else []
        return [f"{place}{kind}: {self.message}", *shown]


@dataclass(eq=False)
class CompileError(Error):
    """The model cannot be compiled.

    Parameters
    ----------
    findings : list of Finding
        At most ten are shown; each has a location, what was found and what was expected.
    """

    findings: list[Finding] = field(default_factory=list)

    LIMIT = 10

    @classmethod
    def at(cls, loc: Loc, message: str, *, hint: str = "", snippet: str = "") -> CompileError:
        """Return an error with a single finding at ``loc``."""
        return cls([Finding(message, loc, snippet, hint)])

    def __str__(self) -> str:
        shown = [f.render() for f in self.findings[: self.LIMIT]]
        more = len(self.findings) - self.LIMIT
        return "\n\n".join(shown + ([f"and {more} more"] if more > 0 else []))


def name_hint(name: str, known: Sequence[str], more: str = "") -> str:
    """Return a hint for an unknown name: the nearest known name and ``more``, or all known names."""
    near = get_close_matches(name, known, n=1)
    return f"{near[0]}{more}" if near else f"one of {', '.join(known)}"


class CallbackFailed(Exception):
    """A user function raised ``error``; aotc's frames pass this exception unchanged to the public entry point."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class AotcWarning(UserWarning):
    """A warning: aotc continues after a problem."""


def warn_user(message: str) -> None:
    """Warn at the caller's own line: the innermost one outside of this package.

    Warns
    -----
    AotcWarning
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN_FILES):
        frame, level = frame.f_back, level + 1
    warnings.warn(AotcWarning(message), stacklevel=level)


class InternalError(Error):
    """A bug in aotc.

    Parameters
    ----------
    message : str
        The failure, and the compiler stage in which it occurred.
    dump : str
        Folder with the traceback and the input of the stage, if it was written.
    repeat : str
        The command that reproduces the failure.

    Attributes
    ----------
    reproducer : str
        File with everything that reproduces it (:mod:`aotc.source.reproducer`), if it was written.
    """

    def __init__(self, message: str, dump: str = "", repeat: str = "") -> None:
        super().__init__(message)
        self.message, self.dump, self.repeat, self.reproducer = message, dump, repeat, ""

    def __str__(self) -> str:
        text = [f"internal error: {self.message}", "  this is a bug in aotc, not in your model"]
        if self.dump:
            text.append(f"  traceback, and the IR before it: {self.dump}")
        if self.reproducer:
            text.append(f"  model, options and versions in one file, for a report: {self.reproducer}")
        if self.repeat:
            text.append(f"  to repeat: {self.repeat}")
        return "\n".join(text)

    def __reduce__(self) -> tuple[type[InternalError], tuple[str, str, str], dict[str, str]]:
        return type(self), (self.message, self.dump, self.repeat), {"reproducer": self.reproducer}


def size_text(size: int) -> str:
    """Format ``size`` bytes as ``12.3 MB`` (powers of 1000)."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"
