"""Inspect and rewrite the text of a model before MLIR parses it: find text that may crash MLIR, update old syntax.

For some ops MLIR's verifiers divide by 0 or allocate gigabytes. An alias, an escape or a comment may hide the critical
attribute, so the patterns match the op's name alone. Text that matches is first read in a child process
(:mod:`aotc.source.reader_process`).

Other versions of MHLO have ops that jaxlib's version lacks, such as ``mhlo.erf_inv``; CHLO has most of them under the
same name.

In StableHLO text of 2023 lists of integers were ``dense<[1, 2]> : tensor<2xi64>``, and are ``array<i64: 1, 2>`` now.
Only attributes that became arrays are rewritten; ``padding`` and ``replica_groups`` are still tensors. Line numbers are
unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.aliases import check_aliases

# Depth of nested brackets of any kind, or length of a run of minus signs, in a model's text. MLIR's native parser
# recurses over both; it crashed at 4000. Measured with jaxlib 0.10 and a stack of 8 MB.
MOST_BRACES = 1000

# Alternatives with literal first characters: [<>]= takes twice as long.
_NOT_NESTED = re.compile(rb'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*|->|<=|>=')
_BRACKETS = re.compile(rb"[][(){}<>]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[](){}<>"))
_MINUSES = re.compile(rb"-(?:\s*-){%d}" % MOST_BRACES)
_CRASHES = re.compile(
    rb"all_to_all"  # the verifier divides by the number of replica groups: SIGFPE for tensor<0x1xi64>
    rb'|"[^"\n]*\\[^"\n]*"[ \t]*\('  # an op whose name has escapes may be any op
    rb"|\\[89A-Fa-f][0-9A-Fa-f]"  # a location's name that is not UTF-8 ends the process where jaxlib returns it
)
_LARGE_DIM = re.compile(rb"[\[,]\s*(?:0x[0-9a-fA-F]+|[0-9]{7,})\s*[],]")  # of dim_numbers: this many are allocated
_NAMES = (
    "broadcast_dimensions", "broadcast_sizes", "known_expanding_dimensions", "known_nonexpanding_dimensions",
    "dimensions", "permutation", "start_indices", "limit_indices", "strides", "slice_sizes", "edge_padding_low",
    "edge_padding_high", "interior_padding", "window_dimensions", "window_strides", "base_dilations",
    "window_dilations", "window_reversal", "lhs_dilation", "rhs_dilation", "fft_length",
)  # fmt: skip
_LIST = re.compile(
    rf"(?<![\w.])({'|'.join(_NAMES)})(\s*=\s*)dense<\s*(\[[\s\w,-]*\]|[\w-]*)\s*>\s*:\s*tensor<\s*(\d+)x(i64|i1)\s*>"
)
_MHLO_OP = re.compile(r'(?<!loc\()"mhlo\.(\w+)"(?=\s*\()')
_MHLO_UNARY = re.compile(  # the short form of an op with one operand: of its type, or with both types
    r"(?<![\w.@$#!\"])mhlo\.(\w+)\s+(%[\w$.-]+(?:#\d+)?)\s*(\{[^{}\n]*\})?\s*:\s*"
    r"(?:\(?(?P<in>tensor<[^\n()]*?>)\)?\s*->\s*(?P<out>tensor<[^\n()]*>)|(?P<same>tensor<[^\n()]*>))"
)
_STRING = re.compile(r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"|//[^\n]*')


def is_text(data: bytes) -> bool:
    """Return True if ``data`` looks like MLIR text."""
    head = data[:4096].lstrip()
    return head.startswith((b"module", b"#", b'"builtin', b"//", b"func", b"!", b"vhlo", b"sdy.", b'"func'))


def is_readable(data: bytes) -> bool:
    """Return True if ``data`` is text of any kind."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c.isspace() for c in text[:4096])


def check_characters(text: str) -> None:
    """Reject text that cannot be encoded: unpaired surrogates. MLIR and digests need bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        loc = Loc("", text.count("\n", 0, error.start) + 1)
        message = f"the model's text has U+{ord(text[error.start]):04X}, half of a surrogate pair"
        raise CompileError.at(loc, message, hint="open the file with encoding='utf-8'") from None


def check_braces(text: str | bytes, path: str) -> None:
    """Reject text with brackets or aliases nested so deep that MLIR would overflow its stack and crash.

    Fast path: delete all characters but brackets, then matching pairs a few times; most text is empty then.
    """
    code = text.encode() if isinstance(text, str) else text
    bare = _NOT_NESTED.sub(b" ", code)  # has the same lines as the text
    left = bare.translate(None, _NOT_BRACKETS)
    for pair in (b"()", b"[]", b"{}", b"<>") * (MOST_BRACES // 8):  # each removes at most one level
        if len(left) <= MOST_BRACES // 2:
            break
        left = left.replace(pair, b"")
    at = _first_too_deep(bare) if len(left) > MOST_BRACES // 2 else -1
    if minuses := _MINUSES.search(bare):
        at = minuses.start()
    if at >= 0:
        message = f"the model's text is nested more than {MOST_BRACES} deep"
        raise CompileError.at(Loc(path, bare.count(b"\n", 0, at) + 1), message, hint="select between values")
    check_aliases(bare, path, MOST_BRACES)


def _first_too_deep(bare: bytes) -> int:
    """Return the offset of the first bracket that is nested too deep, or -1."""
    depth = 0
    for bracket in _BRACKETS.finditer(bare):
        depth = max(0, depth + (1 if bracket[0] in b"([{<" else -1))
        if depth > MOST_BRACES:
            return bracket.start()
    return -1


def suspect_line(text: bytes) -> int:
    """Return the line, from 1, where MLIR's parser may crash or allocate without bound; 0 if there is none."""
    crash = _CRASHES.search(text) or (_LARGE_DIM.search(text) if b"conv" in text else None)
    return text.count(b"\n", 0, crash.start()) + 1 if crash else 0


def modern_text(text: str) -> str:
    """Rewrite integer lists of old StableHLO text as arrays; return text without such lists unchanged."""
    if not _LIST.search(text):
        return text
    literals = [m.span() for m in _STRING.finditer(text)]
    parts: list[str] = []
    end = 0
    for start, stop in [*literals, (len(text), len(text))]:
        parts += [_LIST.sub(_integer_list_as_array, text[end:start]), text[start:stop]]
        end = stop
    return "".join(parts)


def _integer_list_as_array(matched: re.Match[str]) -> str:
    """Rewrite one list attribute: ``dense<[1, 2]> : tensor<2xi64>`` to ``array<i64: 1, 2>``."""
    name, equals, body, count, element = matched.groups()
    values = [v.strip() for v in body.strip("[]").split(",") if v.strip()]
    if not body.startswith("["):
        values *= int(count)  # one value fills the list
    if len(values) != int(count):
        return matched[0]  # the parser reports it
    lines = "\n" * matched[0].count("\n")
    return f"{name}{equals}array<{element}{': ' if values else ''}{', '.join(values)}>{lines}"


def chlo_text(text: str, is_op: Callable[[str], bool]) -> str:
    """Rewrite MHLO ops that jaxlib lacks as CHLO ops of the same name; line numbers are unchanged.

    ``is_op`` returns True for the name of an op that jaxlib has.
    """

    def missing(name: str) -> bool:
        return not is_op(f"mhlo.{name}") and is_op(f"chlo.{name}")

    def generic(matched: re.Match[str]) -> str:
        return f'"chlo.{matched[1]}"' if missing(matched[1]) else matched[0]

    def unary(matched: re.Match[str]) -> str:
        """Rewrite a unary op in short form, with its operand and result types."""
        if not missing(matched[1]):
            return matched[0]
        operand, result = (matched[side] or matched["same"] for side in ("in", "out"))
        return f'"chlo.{matched[1]}"({matched[2]}) {matched[3] or ""} : ({operand}) -> {result}'

    return _MHLO_UNARY.sub(unary, _MHLO_OP.sub(generic, text)) if "mhlo." in text else text
