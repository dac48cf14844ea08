"""Generate large splat constants by kernels where they are needed, instead of storing them in the bundle.

Before, for ``jnp.zeros(n).at[i].add(x)``::

    copy constant -> arena          // n elements in the bundle
    launch scatter -> arena

After::

    launch fill -> arena
    launch scatter -> arena

A copy of such a constant becomes a launch of the fill kernel. Readers of the constant itself share one filled array.
The function fills it before the outermost loop or branch of its first reader.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aotc.diagnostics import Loc
from aotc.ir.dims.algebra import static
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Launch, Step, Storage
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value
from aotc.lowering.program.memories import Memories
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import to_numpy


def filling_value(array: np.ndarray) -> np.ndarray | None:
    """Return the scalar whose bits all elements of ``array`` have, or None; the array must not be empty."""
    first = array.reshape(-1)[:1] if array.flags.c_contiguous else array[(slice(0, 1),) * array.ndim].reshape(-1)
    if any(array.strides[d] for d in range(array.ndim) if array.shape[d] > 1):
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, array.itemsize)
        step = max(len(bits) // 64, 1)  # most arrays differ in a sample of elements
        if (bits[::step] != bits[0]).any() or (bits != bits[0]).any():
            return None
    return first.reshape(())


FILLED_BYTES = Limit(
    4096,
    "bytes of an array of equal constants that a GPU bundle stores; a kernel fills larger ones",
    "the fill kernel starts as soon as a copy would, and takes no space in the bundle",
)
FILLED_BYTES_CPU = Limit(
    1 << 14,
    "bytes of an array of equal constants that a CPU bundle stores; a kernel fills larger ones",
    "the code of the fill kernel is less than a tenth of it",
)


@dataclass
class ConstantFills:
    """Splat constants of one function that kernels write, and the launches that write them.

    Attributes
    ----------
    memories : Memories
    used : dict of str to Kernel
        The kernels of the function, by name; fill kernels are added.
    arena : list of Storage
        The temporary arrays of the function; filled arrays are added.
    """

    memories: Memories
    used: dict[str, Kernel]
    arena: list[Storage]
    _values: dict[Storage, tuple[np.ndarray, str, Loc]] = field(default_factory=dict)
    _ahead: list[Step] = field(default_factory=list)
    _arrays: dict[Storage, Storage] = field(default_factory=dict)
    _read: set[Storage] = field(default_factory=set)

    def constant_storage(self, op: Op, space: int) -> Storage:
        """Return the storage of a constant: in the bundle, or of kind ``fill`` if kernels write it."""
        type_ = op.result.type
        array = np.broadcast_to(op.attrs["value"], [static(d) for d in type_.shape])
        array = array.astype(to_numpy(type_.dtype), copy=False)
        limit = FILLED_BYTES if self.memories.spaces[space].target.kind == "cuda" else FILLED_BYTES_CPU
        if limit.holds(array.nbytes) or (value := filling_value(array)) is None:
            return Storage(
                "constant", array.nbytes, self.memories.add_constant(array, op.result.name, space), space=space
            )
        storage = Storage("fill", array.nbytes, space=space)
        self._values[storage] = value, type_.dtype, op.loc
        return storage

    def fill_launch(self, source: Storage, target: Storage) -> Launch:
        """Return the launch that writes a constant of kind ``fill`` to ``target``."""
        value, dtype, loc = self._values[source]
        count = static(source.size) // value.itemsize
        if not any(value.tobytes()):  # all dtypes share the kernels of zeros
            size = next(n for n in (8, 4, 2, 1) if static(source.size) % n == 0)
            value, dtype, count = np.zeros((), f"u{size}"), f"u{8 * size}", static(source.size) // size
        name = f"fill_{dtype}_{value.tobytes()[::-1].hex()}_{count}" + (f"_{target.space}" if target.space else "")
        if name not in self.used:
            self.used[name] = self._fill_kernel(name, value, TensorType(dtype, (count,)), target.space)
        return Launch(self.used[name], (), (target,), loc)

    def _fill_kernel(self, name: str, value: np.ndarray, type_: TensorType, space: int) -> Kernel:
        """Return the kernel that fills an array of ``type_`` with ``value``."""
        result = Value("filled", type_)
        body = Region((), (Op("constant", (), (result,), {"value": value}),), (result,))
        function = Function(name, body, attrs={"kind": "loop", "root": result.name})
        return self.memories.lower_region(function, self.memories.spaces[space].target)

    def filled_array(self, source: Storage) -> Storage:
        """Return an array with a constant of kind ``fill``, filled before the current step."""
        if source not in self._arrays:
            array = self._arrays[source] = Storage("arena", source.size, space=source.space)
            self.arena.append(array)
            self._ahead.append(self.fill_launch(source, array))
        self._read.add(self._arrays[source])
        return self._arrays[source]

    def launches_before(self, begin: int, end: int) -> list[Step]:
        """Return the launches that must precede the steps of the times from ``begin`` to ``end``."""
        for array in self._read:
            array.touch(begin)
            array.touch(end)
        steps = list(self._ahead)
        self._ahead.clear()
        self._read.clear()
        return steps
