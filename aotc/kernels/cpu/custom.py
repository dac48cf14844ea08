"""Compile a user's function for a custom call to a native object, with a shim that converts pointers to arrays."""

from __future__ import annotations

import dis
import inspect
import types as python_types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numba
from numba import cloudpickle
from numba.core import cgutils, errors, types
from numba.extending import intrinsic
from numba.np import arrayobj

from aotc.kernels import back_end
from aotc.kernels import numba_aot as aot
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES

Shapes = Sequence[tuple[str, int]]

# Functions of the C math library, which every Python process has loaded.
_MATH = """
    acos acosh asin asinh atan atan2 atanh cbrt ceil copysign cos cosh erf erfc exp exp2 expm1 fabs floor fma fmax
    fmin fmod hypot ldexp lgamma log log10 log1p log2 nextafter pow remainder rint round sin sincos sinh sqrt tan
    tanh tgamma trunc
"""
MATH_SYMBOLS = frozenset(name + suffix for name in _MATH.split() for suffix in ("", "f"))


class NativeFunctionRefused(Exception):
    """A user's function cannot be compiled; the text of the exception is the reason."""


def python_function_of(function: Any) -> Callable[..., Any]:
    """Return the Python function behind ``function``, a function or a Numba dispatcher, as a member of ``__main__``.

    A function of module ``__main__`` is pickled by value, so that the compiler process need not import the user's
    module.

    Raises
    ------
    NativeFunctionRefused
        If ``function`` is not a Python function, raises exceptions, or has ``*args`` or ``**kwargs``.
    """
    inner = getattr(function, "py_func", function)
    if not isinstance(inner, python_types.FunctionType):
        raise NativeFunctionRefused(f"{function!r} is not a Python function")
    if any(i.opname == "RAISE_VARARGS" for i in dis.get_instructions(inner)):
        raise NativeFunctionRefused("it raises an exception or asserts, which compiled code cannot do")
    code = inner.__code__
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS):
        raise NativeFunctionRefused("it has *args or **kwargs; name each parameter")
    # Numba lacks keyword-only parameters. They follow the others, so this turns them into ordinary ones.
    code = code.replace(co_argcount=code.co_argcount + code.co_kwonlyargcount, co_kwonlyargcount=0)
    copy = python_types.FunctionType(code, inner.__globals__, inner.__name__, None, inner.__closure__)
    copy.__module__ = "__main__"
    return copy


def parameter_values_of(function: Any, arrays: int, attributes: Mapping[str, Any]) -> list[Any]:
    """Return the values of the parameters that follow the arrays: attributes of the custom call, or defaults.

    Raises
    ------
    NativeFunctionRefused
        If the function does not take ``arrays`` arrays, or takes other attributes.
    """
    inner = getattr(function, "py_func", function)
    try:
        bound = inspect.signature(inner).bind(*[None] * arrays, **attributes)
    except TypeError as error:
        shown = ", ".join(attributes) or "none"
        call = f"the call has {arrays} operands and results, and attributes {shown}"
        raise NativeFunctionRefused(f"it does not fit: {call}: {error}") from None
    bound.apply_defaults()
    return list(bound.arguments.values())[arrays:]


def pickle_function(function: Any) -> bytes:
    """Pickle ``function`` for the compiler process.

    Raises
    ------
    NativeFunctionRefused
        If ``function`` is not a Python function, raises exceptions, or uses objects that cannot be pickled.
    """
    inner = python_function_of(function)
    try:
        return cloudpickle.dumps(inner)
    except Exception as error:
        reason = f"it refers to an object that cannot be pickled for the compiler process: {error}"
        raise NativeFunctionRefused(reason) from error


def numba_type(dtype: str) -> Any:
    """Return Numba's type for a dtype; floats that Numba lacks become unsigned integers with the same bits."""
    row = DTYPES[dtype]
    match row.kind:
        case "b":
            return types.boolean
        case "i" | "u":
            return getattr(types, f"{'u' if row.kind == 'u' else ''}int{max(row.bits, 8)}")
        case "c":
            return {"c64": types.complex64, "c128": types.complex128}[dtype]
    return {"f32": types.float32, "f64": types.float64}.get(dtype) or getattr(types, f"uint{max(row.bits, 8)}")


@intrinsic
def _array_from_pointer(typing_context, pointer, shape):
    """Create a row-major array from a pointer and a shape; ``numba.carray`` would need Numba's runtime."""
    kind = types.Array(pointer.dtype, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        array = context.make_array(kind)(context, builder)
        sizes = cgutils.unpack_tuple(builder, arguments[1], kind.ndim)
        bytes_ = context.get_constant(types.intp, arrayobj.get_itemsize(context, kind))
        strides: list[Any] = []
        step = bytes_
        for size in reversed(sizes):
            strides.insert(0, step)
            step = builder.mul(step, size)
        data = builder.bitcast(arguments[0], array.data.type)
        arrayobj.populate_array(array, data=data, shape=sizes, strides=strides, itemsize=bytes_, meminfo=None)
        return array._getvalue()

    return kind(pointer, shape), codegen


def _pointer_signature_shim(function: Callable[..., Any], arrays: Shapes, values: Sequence[Any]) -> Callable[..., Any]:
    """Return a function of pointers and sizes that calls ``function`` with arrays, followed by ``values``."""
    lines = []
    at = 0
    for n, (_, rank) in enumerate(arrays):
        sizes = "".join(f"sizes[{at + k}], " for k in range(rank))
        at += rank
        lines.append(f"    a{n} = array(p{n}, ({sizes}))")
    given = [f"a{n}" for n in range(len(arrays))] + [repr(value) for value in values]
    parameters = ", ".join([f"p{n}" for n in range(len(arrays))] + ["sizes"])
    answer = f"    sizes[{at}] = -1"  # the kernel repeats the call until it finds this
    text = "\n".join([f"def shim({parameters}):", *lines, f"    function({', '.join(given)})", answer])
    scope: dict[str, Any] = {"array": _array_from_pointer, "function": numba.njit(error_model="numpy")(function)}
    exec(compile(text, "<custom call>", "exec"), scope)
    return scope["shim"]


def compile_custom(symbol: str, data: bytes, arrays: Shapes, values: Sequence[Any], target: Target) -> bytes:
    """Compile a pickled function to an object file that defines ``symbol``.

    The C function takes a pointer to each array, and a pointer to the sizes of all arrays.

    Raises
    ------
    NativeFunctionRefused
        If Numba cannot compile the function without calls of Python.
    """
    try:
        function = cloudpickle.loads(data)
    except Exception as error:
        raise NativeFunctionRefused(f"the compiler process cannot import what it refers to: {error}") from error
    shim = _pointer_signature_shim(function, arrays, values)
    signature = (*(types.CPointer(numba_type(dtype)) for dtype, _ in arrays), types.CPointer(types.int64))
    try:
        library = aot.compile_by_numba_front_end(symbol, aot.Export(shim, types.void, signature), target)
    except (errors.NumbaError, RuntimeError, NotImplementedError) as error:
        raise NativeFunctionRefused(numba_error_reason(error)) from error
    library.optimize()
    foreign = sorted(library.imports() - back_end.LIBC_ALLOWED - MATH_SYMBOLS)
    if any(name.startswith("NRT_") for name in foreign):
        raise NativeFunctionRefused("it allocates arrays; it must write into the arrays of its results")
    if foreign:
        raise NativeFunctionRefused(f"it calls {', '.join(foreign)}, which exists only in a process with Numba")
    return library.emit_native_object()


def numba_error_reason(error: Exception) -> str:
    """Return the line of a Numba error that names the problem, followed by the line with its location."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines)
    if "NRT" in text or "Only accept returning of array" in text or "built-in function empty" in text:
        return "it allocates an array; it must write into the arrays of its results"
    kept = [line for line in lines if not line.startswith(("During:", "Failed in", "File", "\x1b"))]
    where = next((line for line in lines if line.startswith("File") and "<custom call>" not in line), "")
    return " ".join([kept[0] if kept else text[:200], where]).strip()
