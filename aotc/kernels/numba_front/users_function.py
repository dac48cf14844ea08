"""Print the Python module of a GPU kernel that calls a user's function.

::

    users_function = cuda.jit(device=True)(cloudpickle.loads(...))

    @cuda.jit(device=True)
    def device_element_custom_scaled_0123(x0, y0):
        y0[0] = users_function(x0[0], 0.5)

    def k0_custom(a0: "f32[3, 4]", o0: "f32[3, 4]", items):
        p = i64(cuda.grid(1))
        if p < items:
            device_element_custom_scaled_0123(view(a0, p, (1,)), view(o0, p, (1,)))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aotc.ir.loop.ir import DEVICE_CALL, ExternalCall, Kernel, walk
from aotc.kernels.numba_front.gpu_source import gpu_source
from aotc.kernels.numba_front.source import import_line
from aotc.targets import Target


def users_module(kernel: Kernel, function: Callable[..., Any], attributes: Mapping[str, Any], target: Target) -> str:
    """Return the text of a module that defines ``kernel`` around the user's function that it calls.

    Raises
    ------
    NativeFunctionRefused
        If the function takes other arguments, or cannot be sent to the compiler.
    """
    from aotc.kernels.cpu.custom import parameter_values_of, pickle_function  # imports Numba

    (call,) = (s for s in walk(kernel.body) if isinstance(s, ExternalCall))
    symbol, results = str(call.function), len(kernel.outputs)
    per_element = symbol.startswith(f"{DEVICE_CALL}element_")
    count = len(call.args) - results
    values = [repr(v) for v in parameter_values_of(function, count if per_element else count + results, attributes)]
    xs, ys = [f"x{n}" for n in range(count)], [f"y{n}" for n in range(results)]
    if per_element:
        given = ", ".join([f"{x}[0]" for x in xs] + values)
        body = f"{', '.join(f'{y}[0]' for y in ys)} = users_function({given})"
    else:
        body = f"users_function({', '.join([*xs, *ys, *values])})"
    source = gpu_source(kernel, target)
    parts = [
        f"from numba import cloudpickle, cuda\n\n{import_line(source.names)}",
        f"users_function = cuda.jit(device=True)(cloudpickle.loads({pickle_function(function)!r}))",
        f"@cuda.jit(device=True)\ndef {symbol}({', '.join([*xs, *ys])}):\n    {body}",
        source.text,
    ]
    return "\n\n\n".join(parts)
