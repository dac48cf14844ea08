"""Numba intrinsics of the executor: atomics, calls by address, futex, threads.

Numba's front end is independent of the target. Functions that differ between processors are the hint of a spin loop,
the number of the futex system call and the cycle counter; :mod:`aotc.kernels.cpu.executor.compile` defines them for
each architecture and links them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import extending
from numba.core import cgutils, types

from aotc.kernels.llvm_types import I8, I32, I64, PTR, VOID

intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic  # Numba's is untyped: callers pass no context

WORDS = types.CPointer(types.int64)

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129
CLOCK_MONOTONIC, CLOCK_THREAD_CPUTIME_ID, CLOCK_MONOTONIC_COARSE = 1, 3, 6

SIG_SETMASK = 2
# A worker blocks every signal but those that its own instructions raise (ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS):
# the rest are for the host's threads.
BLOCKED = ~sum(1 << (number - 1) for number in (4, 5, 6, 7, 8, 11, 31)) & (1 << 64) - 1
SIGNAL_SET_WORDS = 16


def declare_function(
    builder: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Type], var_arg: bool = False
) -> ir.Function:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments, var_arg), name)


@intrinsic
def fetch_add(typing_context, pointer, value):
    """Add atomically; return the old value (sequentially consistent)."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("add", args[0], args[1], "seq_cst")

    return types.int64(WORDS, types.int64), codegen


@intrinsic
def fetch_or(typing_context, pointer, value):
    """Set bits atomically; return the old value (sequentially consistent)."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("or", args[0], args[1], "seq_cst")

    return types.int64(WORDS, types.int64), codegen


@intrinsic
def exchange(typing_context, pointer, value):
    """Store atomically; return the old value (sequentially consistent)."""

    def codegen(context, builder, signature, args):
        return builder.atomic_rmw("xchg", args[0], args[1], "seq_cst")

    return types.int64(WORDS, types.int64), codegen


@intrinsic
def compare_exchange(typing_context, pointer, expected, value):
    """Store ``value`` atomically if the word equals ``expected``; return the old value (sequentially consistent)."""

    def codegen(context, builder, signature, args):
        found = builder.cmpxchg(args[0], args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(found, 0)

    return types.int64(WORDS, types.int64, types.int64), codegen


@intrinsic
def acquire(typing_context, pointer):
    """Load a word atomically with acquire ordering: writes before the matching release are visible."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(args[0], "acquire", 8)

    return types.int64(WORDS), codegen


@intrinsic
def release(typing_context, pointer, value):
    """Store a word atomically with release ordering: earlier writes are visible to threads that acquire it."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], args[0], "release", 8)
        return context.get_dummy_value()

    return types.void(WORDS, types.int64), codegen


@intrinsic
def at(typing_context, pointer, index):
    """Return the pointer to word ``index`` after ``pointer``."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return WORDS(WORDS, types.int64), codegen


@intrinsic
def address_of(typing_context, pointer):
    """Return the address of a pointer as an integer."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], I64)

    return types.int64(WORDS), codegen


@intrinsic
def words_at(typing_context, address):
    """Return the pointer to words at an address."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(WORDS))

    return WORDS(types.int64), codegen


@intrinsic
def load_byte(typing_context, address):
    """Return the byte at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I8.as_pointer())
        return builder.zext(builder.load(pointer, align=1), I64)

    return types.int64(types.int64), codegen


@intrinsic
def load_int32(typing_context, address):
    """Return the signed 32-bit integer at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], I32.as_pointer())
        return builder.sext(builder.load(pointer, align=4), I64)

    return types.int64(types.int64), codegen


@intrinsic
def copy_bytes(typing_context, target, source, size):
    """Copy memory that does not overlap."""

    def codegen(context, builder, signature, args):
        pointers = [builder.inttoptr(a, I8.as_pointer()) for a in args[:2]]
        cgutils.raw_memcpy(builder, pointers[0], pointers[1], args[2], ir.Constant(I64, 1))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def stack_words(count: int) -> Callable:
    """Return a Numba intrinsic that allocates ``count`` words (of 64 bits) on the caller's stack."""

    @intrinsic
    def words(typing_context):
        def codegen(context, builder, signature, args):
            memory = cgutils.alloca_once(builder, ir.ArrayType(I64, count))
            return builder.bitcast(memory, context.get_value_type(WORDS))

        return WORDS(), codegen

    return words


@intrinsic
def call_kernel(typing_context, function, buffers, dims, begin, end, scratch, monitor):
    """Call a kernel by its address; see ``vmfb.abi`` for its arguments."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(VOID, [PTR, PTR, I64, I64, PTR, PTR])
        target = builder.inttoptr(args[0], kind.as_pointer())
        buffers, dims, monitor = (builder.bitcast(a, PTR) for a in (args[1], args[2], args[6]))
        builder.call(target, [buffers, dims, args[3], args[4], builder.inttoptr(args[5], PTR), monitor])
        return context.get_dummy_value()

    i = types.int64
    return types.void(i, WORDS, WORDS, i, i, i, WORDS), codegen


@intrinsic
def call_host(typing_context, function, argument):
    """Call a host function by its address with one word as argument; return its result."""

    def codegen(context, builder, signature, args):
        target = builder.inttoptr(args[0], ir.FunctionType(I64, [I64]).as_pointer())
        return builder.call(target, [args[1]])

    return types.int64(types.int64, types.int64), codegen


def address_of_export(name: str) -> Callable:
    """Return a Numba intrinsic for the address of the exported function ``name``, of one pointer argument."""

    @intrinsic
    def address(typing_context):
        def codegen(context, builder, signature, args):
            return builder.ptrtoint(declare_function(builder, name, I64, [PTR]), I64)

        return types.int64(), codegen

    return address


def _clock(number: int) -> Callable:
    """Return a Numba intrinsic that reads the system clock ``number`` in nanoseconds."""

    @intrinsic
    def read(typing_context, memory):
        def codegen(context, builder, signature, args):
            function = declare_function(builder, "clock_gettime", I32, [I32, PTR])
            builder.call(function, [ir.Constant(I32, number), builder.bitcast(args[0], PTR)])
            seconds = builder.load(args[0])
            nanoseconds = builder.load(builder.gep(args[0], [ir.Constant(I64, 1)]))
            return builder.add(builder.mul(seconds, ir.Constant(I64, 10**9)), nanoseconds)

        return types.int64(WORDS), codegen

    return read


clock = _clock(CLOCK_MONOTONIC_COARSE)  # costs no system call anywhere, and 5 ns
exact_clock = _clock(CLOCK_MONOTONIC)  # 20 ns, where it is no system call
processor_clock = _clock(CLOCK_THREAD_CPUTIME_ID)  # of this thread; a system call


@intrinsic
def ticks(typing_context):
    """Return the processor's cycle or timer counter, in its own unit."""

    def codegen(context, builder, signature, args):
        return builder.call(declare_function(builder, "aotc_ticks", I64, []), [])

    return types.int64(), codegen


@intrinsic
def pause(typing_context):
    """Emit the processor's spin-wait hint."""

    def codegen(context, builder, signature, args):
        builder.call(declare_function(builder, "aotc_pause", VOID, []), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_processor(typing_context):
    """Yield the processor to another thread (``sched_yield``)."""

    def codegen(context, builder, signature, args):
        builder.call(declare_function(builder, "sched_yield", I32, []), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def futex(typing_context, word, operation, value, timeout):
    """Call the futex system call: wait while the low half of ``word`` is ``value``, or wake up to ``value`` threads.

    ``timeout`` has seconds and nanoseconds for a wait.
    """

    def codegen(context, builder, signature, args):
        function = declare_function(builder, "syscall", I64, [I64], True)
        zero = ir.Constant(I64, 0)
        address = builder.ptrtoint(args[0], I64)
        number = builder.call(declare_function(builder, "aotc_futex_number", I64, []), [])
        builder.call(function, [number, address, args[1], args[2], builder.ptrtoint(args[3], I64), zero, zero])
        return context.get_dummy_value()

    return types.void(WORDS, types.int64, types.int64, WORDS), codegen


@intrinsic
def start_thread(typing_context, argument):
    """Start a detached thread that runs ``aotc_worker(argument)``; return 0, or the system's error number."""

    def codegen(context, builder, signature, args):
        worker = declare_function(builder, "aotc_worker", VOID, [PTR])
        create = declare_function(builder, "pthread_create", I32, [PTR] * 4)
        detach = declare_function(builder, "pthread_detach", I32, [I64])
        mask = declare_function(builder, "pthread_sigmask", I32, [I32, PTR, PTR])
        identity = cgutils.alloca_once(builder, I64)
        sets = [cgutils.alloca_once(builder, ir.ArrayType(I64, SIGNAL_SET_WORDS)) for _ in range(2)]
        blocked = ir.Constant(I64, BLOCKED)
        builder.store(ir.Constant(ir.ArrayType(I64, SIGNAL_SET_WORDS), [blocked] * SIGNAL_SET_WORDS), sets[0])
        own, before = (builder.bitcast(s, PTR) for s in sets)
        null = ir.Constant(PTR, None)
        pointer = builder.bitcast(args[0], PTR)
        builder.call(mask, [ir.Constant(I32, SIG_SETMASK), own, before])  # a thread begins with its maker's mask
        error = builder.call(create, [builder.bitcast(identity, PTR), null, builder.bitcast(worker, PTR), pointer])
        builder.call(mask, [ir.Constant(I32, SIG_SETMASK), before, null])
        with builder.if_then(builder.icmp_signed("==", error, ir.Constant(I32, 0))):
            builder.call(detach, [builder.load(identity)])
        return builder.sext(error, I64)

    return types.int64(WORDS), codegen
