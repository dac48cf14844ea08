"""LRU memoisation for small pure functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, cast

Function = TypeVar("Function", bound=Callable)


def memoized(function: Function) -> Function:
    """Memoise ``function`` with an LRU cache of 4096 entries; it is thread-safe.

    Use it for questions that repeat in every layer of a model. Results outlive the model, so they must be small.
    """
    return cast(Function, lru_cache(maxsize=4096)(function))
