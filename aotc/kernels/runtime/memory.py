"""Memory of printed kernels: arrays in registers, on the stack, on the heap, in scratch memory and at addresses."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np import arrayobj

from aotc.vmfb.abi import ALIGNMENT, IMPORT_PREFIX

_I8, _I64 = ir.IntType(8), ir.IntType(64)
_BYTES = _I8.as_pointer()


def _array_without_owner(context, builder, kind, data, shape):
    """Return a row-major array of type ``kind`` at ``data``, without an owner."""
    array = context.make_array(kind)(context, builder)
    sizes = cgutils.unpack_tuple(builder, shape, kind.ndim)
    item = context.get_constant(types.intp, arrayobj.get_itemsize(context, kind))
    strides: list[ir.Value] = []
    step = item
    for size in reversed(sizes):
        strides.insert(0, step)
        step = builder.mul(step, size)
    pointer = builder.bitcast(data, array.data.type)
    arrayobj.populate_array(array, data=pointer, shape=sizes, strides=strides, itemsize=item, meminfo=None)
    return array._getvalue()


def array_over(context, builder, kind, data, shape):
    """Return a row-major array of type ``kind`` at ``data`` with a constant shape."""
    sizes = context.make_tuple(builder, types.UniTuple(types.int64, len(shape)), [_I64(size) for size in shape])
    return _array_without_owner(context, builder, kind, data, sizes)


def _element_address(context, builder, kind, value, index):
    """Return the address of element ``index`` of an array, counted in memory order, as a pointer to bytes."""
    array = context.make_array(kind)(context, builder, value)
    return builder.bitcast(builder.gep(array.data, [index]), _BYTES)


@intrinsic
def array_at(typing_context, pointer, kind, shape):
    """Return the array of numbers ``kind`` at an address: ``array_at(p, f32, (64, 32))``."""
    array = types.Array(kind.instance_type, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        return _array_without_owner(context, builder, array, arguments[0], arguments[2])

    return array(pointer, kind, shape), codegen


@intrinsic
def view(typing_context, memory, first, shape):
    """Return an array of ``memory``'s type that starts at its element ``first``: ``view(x, 8, (4,))``."""
    array = types.Array(memory.dtype, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        data = _element_address(context, builder, signature.args[0], arguments[0], arguments[1])
        return _array_without_owner(context, builder, array, data, arguments[2])

    return array(memory, types.int64, shape), codegen


@intrinsic
def flat(typing_context, memory):
    """Return an array as a one-dimensional array, in memory order."""
    array = types.Array(memory.dtype, 1, "C")

    def codegen(context, builder, signature, arguments):
        whole = context.make_array(signature.args[0])(context, builder, arguments[0])
        sizes = context.make_tuple(builder, types.UniTuple(types.intp, 1), [whole.nitems])
        return _array_without_owner(context, builder, array, whole.data, sizes)

    return array(memory), codegen


@intrinsic(prefer_literal=True)
def private(typing_context, shape, kind):
    """Return an uninitialized array on the stack; ``shape`` is constant: ``private((6, 16), f32)``."""
    if not all(isinstance(n, types.IntegerLiteral) for n in shape):
        return None
    array, count = types.Array(kind.instance_type, len(shape), "C"), 1
    for size in shape:
        count *= size.literal_value

    def codegen(context, builder, signature, arguments):
        item = context.get_data_type(kind.instance_type)
        with builder.goto_entry_block():
            local = builder.alloca(ir.ArrayType(item, max(count, 1)))
            local.align = ALIGNMENT
        return array_over(context, builder, array, local, [size.literal_value for size in shape])

    return array(shape, kind), codegen


@intrinsic
def scratch_at(typing_context, scratch, first, shape, kind):
    """Return the array at byte ``first`` of a worker's scratch memory: ``scratch_at(scratch, 64, (8,), f32)``."""
    array = types.Array(kind.instance_type, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        data = _element_address(context, builder, signature.args[0], arguments[0], arguments[1])
        return _array_without_owner(context, builder, array, data, arguments[2])

    return array(scratch, types.int64, shape, kind), codegen


@intrinsic
def allocate(typing_context, shape, kind):
    """Return an uninitialized array on the heap, to pass to :func:`release`: ``allocate((n,), f32)``."""
    array = types.Array(kind.instance_type, len(shape), "C")

    def codegen(context, builder, signature, arguments):
        size = context.get_constant(types.intp, arrayobj.get_itemsize(context, array))
        for count in cgutils.unpack_tuple(builder, arguments[0], array.ndim):
            size = builder.mul(size, count)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_BYTES, [_I64]), "malloc")
        return _array_without_owner(context, builder, array, builder.call(function, [size]), arguments[0])

    return array(shape, kind), codegen


@intrinsic
def release(typing_context, memory):
    """Free an array that :func:`allocate` returned."""

    def codegen(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_BYTES])
        function = cgutils.get_or_insert_function(builder.module, kind, "free")
        builder.call(function, [_element_address(context, builder, signature.args[0], arguments[0], _I64(0))])
        return context.get_dummy_value()

    return types.void(memory), codegen


@intrinsic(prefer_literal=True)
def library_call(typing_context, name, characters, arrays):
    """Call an imported function by Fortran's calling convention, with the addresses of ``arrays``.

    ``characters`` of the arrays are single characters, whose lengths follow the addresses. The loader of a bundle fills
    in the function's address.
    """
    function, count = name.literal_value, characters.literal_value

    def codegen(context, builder, signature, arguments):
        kinds = list(signature.args[2])
        values = cgutils.unpack_tuple(builder, arguments[2], len(kinds))
        places = [_element_address(context, builder, k, v, _I64(0)) for k, v in zip(kinds, values, strict=True)]
        symbol = IMPORT_PREFIX + function
        pointer = builder.module.globals.get(symbol) or ir.GlobalVariable(builder.module, _I64, symbol)
        kind = ir.FunctionType(ir.VoidType(), [_BYTES] * len(places) + [_I64] * count)
        address = builder.inttoptr(builder.load(pointer), kind.as_pointer())
        builder.call(address, [*places, *[_I64(1)] * count])
        return context.get_dummy_value()

    return types.void(name, characters, arrays), codegen
