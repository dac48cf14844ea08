"""Answers of small pure functions, of which the last ones are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable)


def kept(function: Function) -> Function:
    """Return ``function``, which is not run again for what it was asked a while ago; threads may share it.

    For what the layers of a model ask again and again. Answers outlive the model, so they are to be small.
    """
    return cast(Function, lru_cache(maxsize=4096)(function))
