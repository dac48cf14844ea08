"""The main program of a compiler process, started with :data:`START`.

Ahead-of-time compilation by Numba replaces Numba's compile-time context, which would break ``numba.njit`` in the user's
process. So Numba compiles kernels only in such processes. Requests are msgpack maps on standard input, answers on
standard output, each after a length of four bytes. A request is ``{"id", "target", "text"}`` with a kernel in loop IR,
or ``{"id", "target", "executor": true}``, or a user's function: ``{"id", "target", "custom", "symbol", "arrays",
"values"}``. A kernel with ``"compiler": "numba"`` may have a ``source``, a module whose function ``symbol`` replaces
it. An answer has ``object``, ``error`` or ``refused``.
"""

from __future__ import annotations

import os
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

import msgpack

from aotc.ir.loop.ir import Kernel
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.limits import WORKER_FRAMES
from aotc.options import NUMBA
from aotc.targets import Target

START = f"from {__name__} import main; main()"


def read_frame(stream: IO[bytes]) -> Any:
    """Read the next message of a pipe; return None at the end of the stream."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    return msgpack.unpackb(stream.read(struct.unpack("<I", head)[0]))


def write_frame(stream: IO[bytes], message: Any) -> None:
    """Write a message to a pipe."""
    data = msgpack.packb(message)
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def target_fields(target: Target) -> list[Any]:
    """Return a target as a list that msgpack can write and :func:`target_from` reads."""
    return [getattr(target, name) for name in Target.__slots__]


def target_from(fields: list[Any]) -> Target:
    """Return the target of a list from :func:`target_fields`."""
    given: dict[str, Any] = dict(zip(Target.__slots__, fields, strict=True))
    return Target(**{**given, "features": tuple(given["features"])})


def begin_kernel(request: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Emit LLVM IR for a CPU kernel; return the function that compiles it and returns the answer."""
    from aotc.kernels.cpu.compile import emit_kernel, kernel_machine_code

    try:
        emitted = emit_kernel(parse_kernel(request["text"]), target_from(request["target"]))
    except Exception:
        wrong = {"error": traceback.format_exc()}
        return lambda: wrong

    def finish() -> dict[str, Any]:
        try:
            return {"object": kernel_machine_code(emitted)}
        except Exception:
            return {"error": traceback.format_exc()}

    return finish


def answer_compiler_request(request: dict[str, Any]) -> dict[str, Any]:
    """Compile the object of a request from another process; return the answer, also for errors."""
    from aotc.kernels.cpu.compile import compile_kernel

    try:
        target = target_from(request["target"])
        if request.get("executor"):
            from aotc.kernels.cpu.executor.compile import compile_executor

            return {"id": request["id"], "object": compile_executor(target)}
        if "custom" in request:
            return {"id": request["id"], **_compile_custom_call(request, target)}
        kernel = parse_kernel(request["text"])
        if request.get("compiler") == NUMBA:
            return {"id": request["id"], **_compile_kernel_by_numba(kernel, target, request)}
        if target.kind == "cuda":
            from aotc.kernels.cuda.compile import compile_kernel as compile_cuda_kernel

            return {"id": request["id"], "object": compile_cuda_kernel(kernel, target).packed()}
        return {"id": request["id"], "object": compile_kernel(kernel, target)}
    except Exception:
        return {"id": request["id"], "error": traceback.format_exc()}


def _compile_custom_call(request: dict[str, Any], target: Target) -> dict[str, Any]:
    from aotc.kernels.cpu.custom import NativeFunctionRefused, compile_custom

    arrays = [(dtype, rank) for dtype, rank in request["arrays"]]
    try:
        made = compile_custom(request["symbol"], request["custom"], arrays, request["values"], target)
    except NativeFunctionRefused as error:
        return {"refused": str(error)}
    return {"object": made}


def _compile_kernel_by_numba(kernel: Kernel, target: Target, request: dict[str, Any]) -> dict[str, Any]:
    """Compile the printed function of a kernel, or the user's function in place of it, and return the answer."""
    from aotc.kernels.numba_front.compile import KernelRefused, compile_kernel

    source, name = request["source"], request["symbol"]
    if target.kind == "cuda":
        return _compile_kernel_by_numba_cuda(kernel, target, request)
    if not source:
        return {"object": compile_kernel(kernel, target)}
    from aotc.kernels.numba_front.check_replacement import replacement_difference

    try:
        if reason := replacement_difference(kernel, source, name):
            return {"refused": reason}
        return {"object": compile_kernel(kernel, target, source, name)}
    except KernelRefused as error:
        return {"refused": str(error)}


def _compile_kernel_by_numba_cuda(kernel: Kernel, target: Target, request: dict[str, Any]) -> dict[str, Any]:
    from aotc.kernels.numba_front.compile import KernelRefused
    from aotc.kernels.numba_front.gpu_compile import compile_kernel

    try:
        return {"object": compile_kernel(kernel, target, request["source"], request["symbol"]).packed()}
    except KernelRefused as error:
        if not request["source"]:
            raise
        return {"refused": str(error)}


def _preload_numba_cuda() -> None:
    """Load the modules of Numba's CUDA compiler in advance; errors are reported with the first kernel."""
    with suppress(Exception):
        from aotc.kernels.cuda.shell import shell_text

        shell_text("first", False, 1, 0, 1)


def main() -> None:
    """Answer requests until the other side closes the pipe; the arguments are kinds of targets to prepare for."""
    sys.setrecursionlimit(WORKER_FRAMES)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    from aotc.kernels.cpu import compile  # noqa: F401  (start-up overlaps the reading of the model)

    if "cuda" in sys.argv[1:]:
        _preload_numba_cuda()
    with suppress(BrokenPipeError):  # the parent has ended
        while (request := read_frame(sys.stdin.buffer)) is not None:
            write_frame(output, answer_compiler_request(request))
