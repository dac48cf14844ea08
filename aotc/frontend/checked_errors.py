"""Errors of ``jax.experimental.checkify`` as checks: a condition that must not hold, and a message with values.

A check is a dictionary. ``failed`` and ``code`` are positions of arrays; the check fails if the first array is true and
the second equals ``number``. ``message`` is a template for :func:`aotc.vmfb.messages.render`. ``values`` lists the
elements that the message shows: position of an array, first element, and number of consecutive elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.checkify import Error

from aotc.vmfb.dtypes import from_numpy, kind_of
from aotc.vmfb.messages import displayed_dtype, escape_braces, message_field


def checkify_checks(tree: Any, types: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the checks of a checkify error pytree, in order.

    ``types`` are the types of its leaves. If they are None, messages do not show values.
    """
    return _checks_of_error(jax.tree.unflatten(tree, range(tree.num_leaves)), types)


def checks_of_results(tree: Any, types: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the checks of all checkify errors among the results of a function."""
    whole = jax.tree.unflatten(tree, range(tree.num_leaves))
    errors = jax.tree.leaves(whole, is_leaf=lambda node: isinstance(node, Error))
    return [check for error in errors if isinstance(error, Error) for check in _checks_of_error(error, types)]


def _checks_of_error(error: Error, types: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return the checks of one checkify error; the user's exception is formatted once to get its message template."""
    checks = []
    for code, structure in error._metadata.items():
        for effect, failed in error._pred.items():
            values = _MessageValues(types)
            leaves = error._payload[effect]
            if structure.num_leaves != len(jax.tree.leaves(leaves)):
                continue
            exception = jax.tree.unflatten(structure, [values.leaf(n) for n in jax.tree.leaves(leaves)])
            if type(exception) is not effect.error_type:
                continue
            try:
                text = str(exception)
            except Exception:  # the user's format does not fit the values; JAX would report it on failure
                text = type(exception).__name__
            row = {"failed": failed, "code": error._code[effect], "number": int(code)}
            checks.append({**row, "message": values.message(text), "values": values.places})
    return checks


# Elements of an array up to which the message of a failed check shows them; of a larger array it shows the shape. Each
# element is loaded by itself, even if the check passes.
MESSAGE_ELEMENTS = 16


class _MessageValues:
    """Array elements that a message shows, recorded while the message is formatted with placeholders."""

    def __init__(self, types: Sequence[Any] | None) -> None:
        self.types = types
        self.places: list[tuple[int, int, int]] = []
        self.fields: list[str] = []
        self.count = 0

    def leaf(self, number: int) -> _Value:
        """Return the placeholder of the array at position ``number``."""
        if self.types is None:
            return _Value(self, number, (), "", 0)
        shape = tuple(self.types[number].shape)
        try:
            return _Value(self, number, shape, displayed_dtype(from_numpy(self.types[number].dtype)), 0)
        except (KeyError, TypeError):  # a random key has no values
            return _Value(self, number, shape, "", 0)

    def field(self, value: _Value, spec: str) -> str:
        """Record the array ``value`` with its format ``spec``; return the marker for it in the text."""
        has_static_shape = value.dtype and all(isinstance(n, int) for n in value.shape)
        if has_static_shape and value.size <= MESSAGE_ELEMENTS:
            self.fields.append(message_field(self.count, value.dtype, value.shape, spec))
            self.places.append((value.number, value.start, value.size))
            self.count += value.size * (2 if kind_of(value.dtype) == "c" else 1)
        else:
            self.fields.append(escape_braces(f"<{'x'.join(map(str, value.shape)) or 'a value'}>"))
        return f"\0{len(self.fields) - 1}\0"

    def message(self, text: str) -> str:
        """Return the message template for ``text``, in which a format field replaces each marker."""
        parts = text.split("\0")
        return "".join(self.fields[int(part)] if n % 2 else escape_braces(part) for n, part in enumerate(parts))


class _Value:
    """Placeholder in a message for an array, or for a part of one, whose values are known only at run time."""

    def __init__(self, values: _MessageValues, number: int, shape: tuple[Any, ...], dtype: str, start: int) -> None:
        self.values, self.number, self.shape, self.dtype, self.start = values, number, shape, dtype, start

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __getitem__(self, index: int) -> _Value:
        inner = self.shape[1:]
        start = self.start + range(self.shape[0])[index] * int(np.prod(inner, dtype=np.int64))
        return _Value(self.values, self.number, inner, self.dtype, start)

    def __format__(self, spec: str) -> str:
        return self.values.field(self, spec)

    def __str__(self) -> str:
        return self.values.field(self, "")

    __repr__ = __str__
