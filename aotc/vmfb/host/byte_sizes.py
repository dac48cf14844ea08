"""Memory sizes in bytes: parsing of text such as ``64MB``, and the option ``memory_limit``."""

from __future__ import annotations

import re
from numbers import Integral
from typing import TYPE_CHECKING, Any

from aotc.vmfb.errors import ArgumentValueError, CallError

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Executable

EXAMPLES = "a number of bytes, or text such as '64MB'"


def parse_bytes(text: str) -> int:
    """Parse a size such as ``64MB`` or ``1.5 GB`` (powers of 1000), ``64MiB`` (powers of 1024), or a number of bytes.

    Raises
    ------
    ValueError
        If the text is not a size.
    """
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) *(?:([kKMGT])(i?))?B?", text.strip())
    if found is None:
        raise ValueError(f"{text[:60]!r} is not a size: expected a size such as 64MB")
    base = 1024 if found[3] else 1000
    return int(float(found[1]) * base ** " KMGT".index((found[2] or " ").upper()))


def parse_byte_count(value: Any) -> int:
    """Convert an integer, or text such as ``64MB``, to a number of bytes.

    Raises
    ------
    ValueError
        If the value is neither.
    """
    if isinstance(value, str):
        return parse_bytes(value)
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size")
    return int(value)


def limit_memory(executable: Executable, limit: int | str, where: str) -> None:
    """Limit the working memory of all concurrent calls together to ``limit`` bytes.

    Raises
    ------
    CallError
        If the limit is not a positive size, or the device does not support limits.
    """
    try:
        size = parse_byte_count(limit)
    except ValueError:
        size = 0
    if size <= 0:
        raise ArgumentValueError("", f"memory_limit is {limit!r}", expected=f"{EXAMPLES}, more than none")
    if not hasattr(executable, "limit_memory"):
        raise CallError(where, "memory cannot be limited on this device", hint="devices='cpu'")
    executable.limit_memory(size)
