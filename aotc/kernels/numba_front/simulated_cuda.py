"""Run a numba.cuda kernel on a CPU: Numba's CPU compiler compiles it, with replacements for ``numba.cuda``'s names.

Each thread of a block is a thread of this process (:mod:`aotc.kernels.cuda.block`). Compiled code holds the GIL and
releases it only in barriers and exchanges, so that an atomic operation is an ordinary one. The replaced names are those
that printed kernels use and common ones of users' kernels; Numba reports an error for any other name.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CellType, FunctionType, ModuleType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import cuda, int64, njit
from numba.core import types
from numba.core.datamodel.models import OpaqueModel
from numba.core.imputils import lower_constant
from numba.extending import intrinsic, overload_attribute, register_model, typeof_impl

from aotc.ir.loop.ir import WARP
from aotc.kernels.cuda.block import simulate_blocks, simulated_thread
from aotc.kernels.runtime import gpu
from aotc.kernels.runtime.memory import array_over
from aotc.vmfb.abi import ALIGNMENT

_FUNCTION = njit(error_model="numpy", boundscheck=True)  # a user's function must not write beyond its arrays
_ERRORS: list[BaseException] = []
"""Exceptions of callbacks of the running kernel, raised after it: compiled code cannot raise them."""
_LAUNCH = [0, 0, 0]  # threads of a block, blocks, bytes of dynamic shared memory


def simulate_kernel(
    function: Callable[..., None], blocks: int, threads: int, shared: int, arguments: tuple[Any, ...],
    some: Sequence[int] = (), together: bool = False,
) -> None:  # fmt: skip
    """Run a function for numba.cuda on a CPU.

    Parameters
    ----------
    function : callable
        A Python function, or a dispatcher of ``cuda.jit``.
    blocks, threads, shared : int
        The launch: blocks, threads of a block, and bytes of dynamic shared memory.
    arguments : tuple
        Arrays and integers.
    some : sequence of int
        The numbers of the blocks to run; all by default.
    together : bool
        True for a cooperative launch: all blocks run concurrently.

    Raises
    ------
    numba.core.errors.NumbaError
        If the function uses a feature that the simulator lacks.
    IndexError
        If the function accesses an element outside of an array.
    """
    compiled = _compiled_for_cpu(getattr(function, "py_func", function))
    compiled.compile(tuple(numba.typeof(a) for a in arguments))
    _LAUNCH[:] = threads, blocks, shared
    _ERRORS.clear()
    simulate_blocks(compiled, some or range(blocks), threads, shared, arguments, cluster=blocks if together else 1)
    if _ERRORS:
        raise _ERRORS[0]


@lru_cache(maxsize=4)
def _compiled_for_cpu(function: Callable[..., None]) -> Any:
    return _FUNCTION(with_simulated_cuda(function, {}))


def with_simulated_cuda(function: Callable[..., Any], done: dict[int, Any]) -> Callable[..., Any]:
    """Return a copy of a function with the simulator in place of numba.cuda, also in functions that it calls."""

    def moved(value: Any) -> Any:
        if value is cuda:
            return _CUDA
        if value is gpu.grid_barrier:
            return _grid_barrier
        if id(value) in _WORDS:
            return _WORDS[id(value)]
        if not hasattr(value, "py_func") or not isinstance(value, type(gpu.grid_barrier)):
            return value
        if id(value) not in done:
            done[id(value)] = None
            done[id(value)] = _FUNCTION(with_simulated_cuda(value.py_func, done))
        return done[id(value)]

    scope = {name: moved(value) for name, value in function.__globals__.items()}
    cells = tuple(CellType(moved(cell.cell_contents)) for cell in function.__closure__ or ())
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)


# --- the thread, its block, and the launch ---


def _python_callback(*kinds: Any) -> Callable[[Callable[..., int]], Any]:
    """Return the decorator of a Python function, with an i64 result, that compiled code calls."""

    def decorate(function: Callable[..., int]) -> Any:
        def safe(*arguments: int) -> int:
            try:
                return int(function(*arguments))
            except BaseException as error:
                _ERRORS.append(error)
                return 0

        return ctypes.CFUNCTYPE(ctypes.c_int64, *kinds)(safe)

    return decorate


_LONG = ctypes.c_int64
_THREAD, _BLOCK, _THREADS, _BLOCKS, _SHARED = range(5)
_place = _python_callback(_LONG)(
    lambda what: (simulated_thread().thread, simulated_thread().block.number, *_LAUNCH)[what]
)


@_python_callback()
def _simulated_block_barrier() -> int:
    simulated_thread().block.together.wait()
    return 0


@_python_callback()
def _simulated_warp_barrier() -> int:
    simulated_thread().block.exchange_values(0)
    return 0


@_python_callback()
def _simulated_grid_barrier() -> int:
    simulated_thread().block.cluster.wait_for_all()
    return 0


@_python_callback(_LONG, _LONG)
def _value_from_lane(word: int, lane: int) -> int:
    """Return the value of ``word`` in a lane of the warp; a lane outside of the warp stands for the thread itself."""
    words = simulated_thread().block.exchange_values(word)
    return words[lane] if 0 <= lane < len(words) else word


@_python_callback(_LONG)
def _matching_lane_mask(word: int) -> int:
    return sum((other == word) << lane for lane, other in enumerate(simulated_thread().block.exchange_values(word)))


@_python_callback(_LONG, _LONG)
def _shared_address(number: int, size: int) -> int:
    """Return the address of a shared array; number 0 is the dynamic shared memory of the launch."""
    block = simulated_thread().block
    if number == 0:
        return block.memory.ctypes.data
    return block.arrays.setdefault(number, np.full(size, 0xFF, np.uint8)).ctypes.data


class _Indices:
    """Replacement for ``cuda.threadIdx`` and the like: only ``x`` varies, ``y`` and ``z`` are constant."""

    def __init__(self, what: int) -> None:
        self.what = what


class _IndicesType(types.Type):
    def __init__(self, what: int) -> None:
        self.what = what
        super().__init__(f"Indices({what})")


register_model(_IndicesType)(OpaqueModel)
typeof_impl.register(_Indices)(lambda value, _: _IndicesType(value.what))
lower_constant(_IndicesType)(lambda context, builder, kind, value: context.get_dummy_value())


@overload_attribute(_IndicesType, "x")
def _index(indices):
    what = indices.what
    return lambda indices: np.int32(_place(what))


# --- arrays ---

_NUMBERS = itertools.count(1)
"""Of the calls of ``cuda.shared.array``: threads that run the same call share an array."""


def _array_type(shape: Any, dtype: Any) -> tuple[Any, list[int]] | None:
    """Return the array type and the constant shape of ``cuda.shared.array(shape, dtype)``."""
    sizes = [shape] if isinstance(shape, types.IntegerLiteral) else list(shape)
    if not all(isinstance(n, types.IntegerLiteral) for n in sizes):
        return None
    kind = dtype.instance_type if isinstance(dtype, types.NumberClass) else dtype.dtype
    return types.Array(kind, len(sizes), "C"), [n.literal_value for n in sizes]


@intrinsic(prefer_literal=True)
def _local_array(typing_context, shape, dtype):
    found = _array_type(shape, dtype)
    if found is None:
        return None
    array, sizes = found

    def codegen(context, builder, signature, arguments):
        item = context.get_data_type(array.dtype)
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(item, max(int(np.prod(sizes)), 1)))
            memory.align = ALIGNMENT
        return array_over(context, builder, array, memory, sizes)

    return array(shape, dtype), codegen


@intrinsic(prefer_literal=True)
def _shared_array(typing_context, shape, dtype):
    found = _array_type(shape, dtype)
    if found is None:
        return None
    array, sizes = found

    def codegen(context, builder, signature, arguments):
        size = context.get_abi_sizeof(context.get_data_type(array.dtype))
        own, long = 0 if sizes == [0] else next(_NUMBERS), ir.IntType(64)  # this runs once for each call in the text
        address = ctypes.cast(_shared_address, ctypes.c_void_p).value
        function = builder.inttoptr(long(address), ir.FunctionType(long, [long, long]).as_pointer())
        found = builder.call(function, [long(own), long(int(np.prod(sizes)) * size)])
        shape = sizes if own else [_LAUNCH[2] // size]
        return array_over(context, builder, array, builder.inttoptr(found, ir.IntType(8).as_pointer()), shape)

    return array(shape, dtype), codegen


# --- exchanges ---


@intrinsic
def _word(typing_context, value):
    """Return the bits of a number as an i64."""

    def codegen(context, builder, signature, arguments):
        raw, long = arguments[0], ir.IntType(64)
        if isinstance(raw.type, ir.FloatType):
            raw = builder.bitcast(raw, ir.IntType(32))
        if isinstance(raw.type, ir.DoubleType):
            raw = builder.bitcast(raw, long)
        return raw if raw.type == long else builder.zext(raw, long)

    return types.int64(value), codegen


@intrinsic
def _number(typing_context, word, like):
    """Return the number of ``like``'s type with the bits of an i64."""

    def codegen(context, builder, signature, arguments):
        (raw, like_), long = arguments, ir.IntType(64)
        if isinstance(like_.type, ir.FloatType):
            return builder.bitcast(builder.trunc(raw, ir.IntType(32)), like_.type)
        if isinstance(like_.type, ir.DoubleType):
            return builder.bitcast(raw, like_.type)
        return raw if like_.type == long else builder.trunc(raw, like_.type)

    return like(word, like), codegen


@njit
def _lane():
    return _place(_THREAD) % WARP


@njit
def _shfl_sync(mask, value, lane):
    return _number(_value_from_lane(_word(value), int64(lane)), value)


@njit
def _shfl_xor_sync(mask, value, lane_mask):
    return _number(_value_from_lane(_word(value), _lane() ^ int64(lane_mask)), value)


@njit
def _shfl_up_sync(mask, value, delta):
    return _number(_value_from_lane(_word(value), _lane() - int64(delta)), value)


@njit
def _shfl_down_sync(mask, value, delta):
    return _number(_value_from_lane(_word(value), _lane() + int64(delta)), value)


@njit
def _match_any_sync(mask, value):
    return np.uint32(_matching_lane_mask(_word(value)))


@njit
def _grid(dimensions):
    return _place(_BLOCK) * _place(_THREADS) + _place(_THREAD)


@njit
def _grid_size(dimensions):
    return _place(_BLOCKS) * _place(_THREADS)


@njit
def _syncthreads():
    _simulated_block_barrier()


@njit
def _syncwarp(mask=0):
    _simulated_warp_barrier()


@njit
def _threadfence():
    pass


@njit
def _grid_barrier(counter):
    _simulated_grid_barrier()


# --- atomic operations ---


@njit
def _add(array, index, value):
    old = array[index]
    array[index] = old + value
    return old


@njit
def _sub(array, index, value):
    old = array[index]
    array[index] = old - value
    return old


@njit
def _max(array, index, value):
    old = array[index]
    array[index] = max(old, value)
    return old


@njit
def _min(array, index, value):
    old = array[index]
    array[index] = min(old, value)
    return old


@njit
def _and(array, index, value):
    old = array[index]
    array[index] = old & value
    return old


@njit
def _or(array, index, value):
    old = array[index]
    array[index] = old | value
    return old


@njit
def _xor(array, index, value):
    old = array[index]
    array[index] = old ^ value
    return old


@njit
def _exch(array, index, value):
    old = array[index]
    array[index] = value
    return old


def _simulated_cuda_module(name: str, **words: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(words)
    return made


_CUDA = _simulated_cuda_module(
    "simulated_cuda",
    threadIdx=_Indices(_THREAD),
    blockIdx=_Indices(_BLOCK),
    blockDim=_Indices(_THREADS),
    gridDim=_Indices(_BLOCKS),
    grid=_grid,
    gridsize=_grid_size,
    syncthreads=_syncthreads,
    syncwarp=_syncwarp,
    threadfence=_threadfence,
    threadfence_block=_threadfence,
    shared=_simulated_cuda_module("shared", array=_shared_array),
    local=_simulated_cuda_module("local", array=_local_array),
    atomic=_simulated_cuda_module(
        "atomic", add=_add, sub=_sub, max=_max, min=_min, and_=_and, or_=_or, xor=_xor, exch=_exch
    ),
    shfl_sync=_shfl_sync,
    shfl_xor_sync=_shfl_xor_sync,
    shfl_up_sync=_shfl_up_sync,
    shfl_down_sync=_shfl_down_sync,
    match_any_sync=_match_any_sync,
)
_WORDS = {id(getattr(cuda, name)): word for name, word in vars(_CUDA).items() if hasattr(cuda, name)}
"""The simulator's words by the identity of numba.cuda's, for ``from numba.cuda import grid``."""
