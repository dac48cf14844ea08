"""Helpers for numba.cuda that printed GPU kernels import in addition to :mod:`aotc.kernels.runtime`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from numba import cuda, uint32

_HIGHEST = 1 << 31


@cuda.jit(device=True)
def grid_barrier(counter):
    """Wait for all threads of a cooperative launch; ``counter[0]`` is a word whose lower 31 bits are 0.

    Each block adds a number to the word so that the total flips its highest bit: the first block adds the rest.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        share = uint32(_HIGHEST - (cuda.gridDim.x - 1)) if cuda.blockIdx.x == 0 else uint32(1)
        cuda.threadfence()
        before = cuda.atomic.add(counter, 0, share)
        while (cuda.atomic.add(counter, 0, uint32(0)) ^ before) < uint32(_HIGHEST):
            pass
        cuda.threadfence()
    cuda.syncthreads()


class TemplateKernel(NamedTuple):
    """A kernel that a template for tensor cores computes.

    Attributes
    ----------
    tiles : dataclass
        The template's parameters.
    py_func : callable
        The loops that it computes, as a function for a CPU: the parameters are the arrays, the kernel's dims, scratch
        memory, and a range of the grid, whose size is 1.
    """

    tiles: Any
    py_func: Callable[..., None]


def template(tiles: Any) -> Callable[[Callable[..., None]], TemplateKernel]:
    """Return the decorator of a function whose loops the template of ``tiles`` computes."""
    return partial(TemplateKernel, tiles)
