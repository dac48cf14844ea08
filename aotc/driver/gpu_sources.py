"""GPU kernels that are compiled from Python source of the user instead of loop IR.

Such a kernel calls a function that the user registered for a custom call, or the user's function replaces it
(``replace=``). A replacement is first compared with the kernel: in the simulator, and on a GPU if one runs the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.diagnostics import CompileError
from aotc.driver.gpu_kernels import GpuKernels
from aotc.ir.loop.ir import Kernel
from aotc.kernels.cpu.build import replacement_error
from aotc.kernels.cpu.custom import NativeFunctionRefused
from aotc.kernels.cuda.build import build_kernel_images
from aotc.kernels.numba_front.check_replacement import TRIALS
from aotc.kernels.numba_front.compile import KernelRefused
from aotc.kernels.numba_front.gpu_compile import compile_kernel
from aotc.kernels.numba_front.gpu_trial import gpu_trial_difference
from aotc.kernels.numba_front.trial import output_difference, random_arguments
from aotc.kernels.numba_front.users_function import users_module
from aotc.lowering.regions.custom_call import CustomCall
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.custom_calls import registered_call
from aotc.vmfb.devices.cuda.device import obstacle
from aotc.vmfb.errors import CallError


def gpu_kernel_sources(
    kernels: Sequence[Kernel], calls: Mapping[str, CustomCall], replaced: Mapping[str, str], target: Target,
    options: Options,
) -> dict[str, str]:  # fmt: skip
    """Return the Python source of each kernel in ``calls`` and ``replaced``, by the kernel's name.

    Parameters
    ----------
    kernels : sequence of Kernel
        The kernels of a variant.
    calls : mapping of str to CustomCall
        The custom call of each kernel that calls a user's function.
    replaced : mapping of str to str
        Source of the module that defines each replacement.
    target : Target
        The GPU.
    options : Options
        Options of the compilation.

    Raises
    ------
    CompileError
        If a function cannot be compiled, or a replacement differs from its kernel.
    """
    sources = {k.name: _users_function_source(k, calls[k.name], target) for k in kernels if k.name in calls}
    trials = {k.name: _checked_replacement(k, replaced[k.name], target, options) for k in kernels if k.name in replaced}
    return sources | trials


def uncompiled_call_error(call: CustomCall, reason: str) -> CompileError:
    """Return the error for a custom call whose function for GPUs cannot be compiled."""
    message = f"custom call @{call.name}: its function for GPUs cannot be compiled into the bundle: {reason}"
    return CompileError.at(call.loc, message, hint="change it, or register the call without gpu= to run it on the host")


def _users_function_source(kernel: Kernel, call: CustomCall, target: Target) -> str:
    """Return the source of a kernel that calls the function registered for a custom call."""
    registered = registered_call(call.name)
    if registered is None or registered.gpu is None:
        raise uncompiled_call_error(call, "it is not registered any more")
    try:
        return users_module(kernel, registered.gpu.function, call.attributes, target)
    except NativeFunctionRefused as error:
        raise uncompiled_call_error(call, str(error)) from None


def _checked_replacement(kernel: Kernel, source: str, target: Target, options: Options) -> str:
    """Compare a replacement with its kernel in the simulator and on the GPU; return the replacement's source."""
    try:
        reason = gpu_trial_difference(kernel, source, target) or _difference_on_gpu(kernel, source, target, options)
    except KernelRefused as error:
        reason = str(error)
    if reason:
        raise replacement_error(kernel.name, reason)
    return source


def _difference_on_gpu(kernel: Kernel, source: str, target: Target, options: Options) -> str:
    """Run ``kernel`` and its replacement on this machine's GPU; describe the difference of their results.

    The result is empty if they agree, or without a GPU. ``source`` is the module that defines the replacement.

    Raises
    ------
    KernelRefused
        If the replacement cannot be compiled.
    """
    if obstacle({"target": target.name}):
        return ""
    built = build_kernel_images([kernel], target, options)
    row = built.kernels[0].entry()
    begin, size = row["image"]
    kernels = GpuKernels("a trial", [row], [built.data[begin : begin + size]])
    image = compile_kernel(kernel, target, source, kernel.name)
    for seed in range(TRIALS):
        arguments = random_arguments(kernel, seed)
        expected, actual = arguments.copied(), arguments.copied()
        try:
            kernels.run_own(kernel, expected)
            kernels.run(image.data, kernel.name, kernel, actual)
        except CallError as error:
            return f"it fails on the GPU: {error}"
        if difference := output_difference(kernel, expected, actual):
            return f"on random arguments on the GPU, {difference}"
    return ""
