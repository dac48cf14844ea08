"""Conversion of call arguments to arrays that kernels can read, with errors that name the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.dtypes import from_numpy, to_numpy
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.ranks.layout import Layout, layout_of, layout_text

GOOD_FLAGS = 0x101  # C-contiguous and aligned: bits of ndarray.flags.num

_SCALARS: dict[type, str] = {bool: "biufc", int: "iufc", float: "fc", complex: "c"}


class Argument:
    """One argument of a signature.

    Attributes
    ----------
    label : str
        ``argument 0 (x)``, for messages.
    name : str
    dtype_name : str
    dtype : numpy.dtype
    dims : tuple of int or str
        A string is a symbolic dimension.
    donated : bool
        True if the program overwrites the argument's memory.
    static : bool
        True if all dims are integers.
    """

    __slots__ = ("dims", "donated", "dtype", "dtype_name", "label", "name", "static")

    def __init__(self, number: int, entry: dict[str, Any]) -> None:
        self.name: str = entry["name"]
        self.label = f"argument {number} ({self.name})" if self.name else f"argument {number}"
        self.dtype_name: str = entry["dtype"]
        self.dtype = to_numpy(self.dtype_name)
        self.dims = tuple(entry["dims"])
        self.donated: bool = entry["donated"]
        self.static = all(isinstance(d, int) for d in self.dims)

    def __str__(self) -> str:
        return f"{self.name}: {type_text(self.dtype_name, self.dims)}"

    def prepare(self, value: Any, where: str, gpu: int = -1) -> Any:
        """Return ``value`` as a plain, C-contiguous, aligned array of the argument's dtype and shape.

        An array on GPU number ``gpu`` is not copied; an array of another library there becomes a :class:`CudaArray`.

        Raises
        ------
        CallError
            Its message has the argument, the found type and the expected type.
        """
        plain = type(value) is np.ndarray and value.dtype is self.dtype and value.shape == self.dims
        if plain and value.flags.num & GOOD_FLAGS == GOOD_FLAGS:
            return value
        if gpu >= 0 and type(value) is not np.ndarray:
            value = self.import_foreign_array(value, where)
        ours = isinstance(value, DeviceArray)
        if ours:
            self.check_not_donated(value, where)
        stays = ours and gpu >= 0 and value.ordinal == gpu
        array = value if stays else self._convert_to_numpy(value, where)
        if array.dtype is not self.dtype:
            array = self._cast_to_declared_dtype(array, where)
        shape = array.shape
        if len(shape) != len(self.dims) or any(isinstance(d, int) and d != n for d, n in zip(self.dims, shape)):
            raise self._wrong_argument_error(
                where, "the wrong shape", type_text(self.dtype_name, shape), kind=ArgumentValueError
            )
        if isinstance(array, np.ndarray) and array.flags.num & GOOD_FLAGS != GOOD_FLAGS:
            array = np.array(array, order="C", copy=True)
        return array

    def is_exact(self, value: DeviceArray, gpu: int) -> bool:
        """Return True if a GPU array can be passed unchanged: same GPU, dtype and static shape, and not donated."""
        same = value.ordinal == gpu and value.dtype is self.dtype and value.shape == self.dims
        return same and not value.donated

    def import_foreign_array(self, value: Any, where: str) -> Any:
        """Import a GPU array of another library as a :class:`CudaArray` of the same memory.

        Return arrays of aotc, NumPy arrays and other values unchanged.

        Raises
        ------
        CallError
            If the array cannot be imported without a copy.
        """
        if isinstance(value, DeviceArray | np.ndarray | np.generic) or type(value) in _SCALARS:
            return value
        from aotc.vmfb.devices.cuda.foreign import imported_array  # only for values of other types

        try:
            found = imported_array(value)
        except Exception as error:  # it runs code of the value's class
            raise ArgumentError(where, f"{self.label} cannot be taken as it is: {error}") from error
        return value if found is None else found

    def check_not_donated(self, value: DeviceArray, where: str) -> None:
        """Refuse an array that was donated to an earlier call."""
        if value.donated:
            found = type_text(dtype_text(value.dtype), value.shape)
            raise self._wrong_argument_error(
                where, "an array that was donated to a call", found, "a result of that call", kind=ArgumentValueError
            )

    def check_type(self, dtype: str, dims: Sequence[int | str], where: str) -> None:
        """Check dtype and dims of a future result that is passed as this argument; symbolic dims match any size.

        Raises
        ------
        CallError
            As in :meth:`prepare`.
        """
        if dtype != self.dtype_name:
            raise self._wrong_argument_error(where, "the wrong dtype", type_text(dtype, dims))
        both = [(d, n) for d, n in zip(self.dims, dims) if isinstance(d, int) and isinstance(n, int)]
        if len(dims) != len(self.dims) or any(d != n for d, n in both):
            raise self._wrong_argument_error(where, "the wrong shape", type_text(dtype, dims), kind=ArgumentValueError)

    def _convert_to_numpy(self, value: Any, where: str) -> np.ndarray:
        """Convert a scalar, an object with ``__array__``, or another library's array to a NumPy array of any dtype."""
        if isinstance(value, (np.ndarray, np.generic)):
            return np.asarray(value)
        if type(value) in _SCALARS:
            return self._convert_scalar(value, where)
        try:
            if hasattr(value, "__array__"):
                return np.asarray(value)
            if hasattr(value, "__dlpack__") or hasattr(value, "__cuda_array_interface__"):
                return np.from_dlpack(value)
        except Exception as error:  # it runs code of the value's class
            return self._import_by_dlpack(value, where, error)
        hint = f"np.asarray(..., dtype={str(self.dtype)!r})"
        raise self._wrong_argument_error(where, "a value that is not an array", type(value).__name__, hint)

    def _import_by_dlpack(self, value: Any, where: str, error: Exception) -> np.ndarray:
        """Import a value that NumPy has refused with ``error``: a GPU array, or one of a dtype unknown to NumPy."""
        from aotc.vmfb.devices.host_arrays import import_host_array, random_key_words  # only for such values

        if (words := random_key_words(value)) is not value:
            return self._convert_to_numpy(words, where)
        found = self.import_foreign_array(value, where)
        if found is not value:
            return found.numpy()
        try:
            imported_array = import_host_array(value)
        except Exception:  # as above
            imported_array = None
        if imported_array is None and type(error).__name__ == "TracerArrayConversionError":
            hint = "call the module outside jax.jit, or in jax.pure_callback(module, shapes, ...)"
            raise ArgumentError(where, f"{self.label} is traced by JAX and has no value", hint=hint) from error
        if imported_array is None:
            raise ArgumentError(where, f"{self.label} cannot be read as an array: {error}") from error
        return imported_array

    def _convert_scalar(self, value: Any, where: str) -> np.ndarray:
        kind = "f" if self.dtype.kind == "V" else self.dtype.kind
        if kind not in _SCALARS[type(value)]:
            raise self._wrong_argument_error(
                where, "a scalar outside the range of its dtype", f"{type(value).__name__} {value!r}"
            )
        try:
            return np.asarray(value, self.dtype)
        except OverflowError:
            raise self._wrong_argument_error(where, "a scalar out of range", value, kind=ArgumentValueError) from None

    def _cast_to_declared_dtype(self, array: np.ndarray, where: str) -> np.ndarray:
        """Cast an array to the argument's dtype where no value changes; refuse any other dtype.

        Casts are allowed from another byte order, and from NumPy's 64-bit defaults to 32 bits.
        """
        if array.dtype == self.dtype:
            return array.view(self.dtype) if isinstance(array, np.ndarray) else array
        if isinstance(array, np.ndarray) and array.dtype.newbyteorder("=") == self.dtype:
            return array.astype(self.dtype)
        if isinstance(array, np.ndarray) and array.dtype.isbuiltin == self.dtype.isbuiltin == 1:
            both = array.dtype.kind + self.dtype.kind
            sizes = array.dtype.itemsize, self.dtype.itemsize
            if sizes == (8, 4) and both in ("ii", "iu", "ui", "uu"):
                return self._narrow_integers(array, where)
            if (both, *sizes) in (("ff", 8, 4), ("cc", 16, 8)):
                return self._narrow_floats(array, where)
        raise self._wrong_argument_error(
            where,
            "the wrong dtype",
            type_text(dtype_text(array.dtype), array.shape),
            f".astype({str(self.dtype)!r}), if that is what you mean",
        )

    def _narrow_integers(self, array: np.ndarray, where: str) -> np.ndarray:
        """Cast 64-bit integers, NumPy's default, to 32 bits; refuse values out of range."""
        limits = np.iinfo(self.dtype)
        wrong = (array < limits.min) | (array > limits.max)
        if wrong.any():
            place = tuple(int(n) for n in np.argwhere(wrong)[0])
            value = int(array[place])
            what = f"{value} at {list(place)}" if place else value
            raise self._wrong_argument_error(
                where, f"a value that {self.dtype_name} cannot hold", what, kind=ArgumentValueError
            )
        return array.astype(self.dtype)

    def _narrow_floats(self, array: np.ndarray, where: str) -> np.ndarray:
        """Cast float64, NumPy's default, to float32, and complex128 to complex64; refuse elements that overflow."""
        with np.errstate(all="ignore"):
            narrowed = array.astype(self.dtype)
        lost = ~np.isfinite(narrowed) & np.isfinite(array)
        if lost.any():
            place = tuple(int(n) for n in np.argwhere(lost)[0])
            what = f"{array[place]} at {list(place)}" if place else array[place]
            raise self._wrong_argument_error(
                where, f"a value that {self.dtype_name} cannot hold", what, kind=ArgumentValueError
            )
        return narrowed

    def _wrong_argument_error(
        self, where: str, problem: str, found: Any, hint: str = "", kind: type[CallError] = ArgumentError
    ) -> CallError:
        return kind(where, f"{self.label} has {problem}", found, type_text(self.dtype_name, self.dims), hint)


def refuse_whole_array(
    row: Mapping[str, Any], label: str, value: object, where: str, source: str = "module.shard(...)"
) -> None:
    """Refuse a whole array for an argument or weight that is partitioned over ranks.

    Parameters
    ----------
    row : mapping
        The argument's or weight's entry in the manifest.
    label : str
        The argument or weight, for messages.
    value : object
    where : str
        The function, for messages.
    source : str
        The call that cuts this rank's part, for the hint.

    Raises
    ------
    ArgumentValueError
        Its message has the part's type, and the call that cuts the part.
    """
    whole, dims = row.get("whole"), tuple(row["dims"])
    if whole is not None and getattr(value, "shape", None) == tuple(whole) != dims:
        found, part = type_text(row["dtype"], whole), type_text(row["dtype"], dims)
        hint = f"this rank's {part}, cut by {layout_text(layout_of(row['layout']))}: {source}"
        raise ArgumentValueError(where, f"{label} is the whole array", found, part, hint)


def dtype_text(dtype: np.dtype) -> str:
    """Return aotc's name of a NumPy dtype, such as ``f32``; NumPy's own name if aotc has none."""
    try:
        return from_numpy(dtype)
    except KeyError:
        return str(dtype)


def type_text(dtype: str, dims: Sequence[int | str]) -> str:
    """Format a type: ``f32[2, n]``."""
    return f"{dtype}[{', '.join(map(str, dims))}]"


class TensorSpec(NamedTuple):
    """The type of an argument or a result.

    Attributes
    ----------
    name : str
        Empty for a result without a name.
    dtype : str
        ``f32``, ``bf16``, ``i1``...
    shape : tuple of int or str
        A string is a size that is known when the function is called.
    device : str
        The device of the model where it is placed; empty if the model names none for it.
    whole : tuple of int
        The shape of the whole array, of which ``shape`` is one rank's part; empty if each rank has the whole array.
    layout : tuple of tuple of str
        The axes of the mesh over which each dim is cut, the slowest first; empty if each rank has the whole array.
    """

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    device: str = ""
    whole: tuple[int, ...] = ()
    layout: Layout = ()

    def __str__(self) -> str:
        name = f"{self.name}: " if self.name else ""
        place = f" on {self.device}" if self.device else ""
        return f"{name}{type_text(self.dtype, self.shape)}{_partition_text(self.dtype, self.whole, self.layout)}{place}"


def _partition_text(dtype: str, whole: Sequence[int], layout: Layout) -> str:
    """Format the partition of an array over a mesh, such as `` of f32[32, 16] cut by data, -``.

    The text is empty if each rank has the whole array.
    """
    return f" of {type_text(dtype, whole)} cut by {layout_text(layout)}" if layout else ""


def tensor_spec_of_row(row: Mapping[str, Any]) -> TensorSpec:
    """Convert an argument's or a result's entry in the manifest to a :class:`TensorSpec`."""
    cut = (tuple(row["whole"]), layout_of(row.get("layout", ()))) if "whole" in row else ()
    return TensorSpec(row["name"], row["dtype"], tuple(row["dims"]), row.get("device", ""), *cut)


def prepare_arguments(
    arguments: Sequence[Argument], values: Sequence[Any], where: str, donate: bool = False, gpus: Sequence[int] = ()
) -> list[Any]:
    """Convert the arguments of a call by :meth:`Argument.prepare`; copy those that the program would overwrite.

    Parameters
    ----------
    arguments : sequence of Argument
    values : sequence
    where : str
        The function, for messages.
    donate : bool
        Allow the program to overwrite the arrays of donated arguments.
    gpus : sequence of int
        The GPU number of each argument, -1 for host memory.
    """
    places = gpus or [-1] * len(arguments)
    arrays = [
        v if gpu >= 0 and isinstance(v, DeviceArray) and a.is_exact(v, gpu) else a.prepare(v, where, gpu)
        for a, v, gpu in zip(arguments, values, places, strict=True)
    ]
    _copy_undonated_arrays(arguments, arrays, donate)
    return arrays


def _copy_undonated_arrays(arguments: Sequence[Argument], arrays: list[Any], donate: bool) -> None:
    """Copy arrays that the program would overwrite although the caller did not donate them (``donate`` False).

    Also copy donated arrays that cannot be overwritten: read-only, or sharing memory with another argument.
    """
    donated = [a.donated for a in arguments]
    if not any(donated):
        return
    shared = indices_that_share_memory(arrays) if donate else set()
    for i, x in enumerate(arrays):
        fixed = not x.flags.writeable if isinstance(x, np.ndarray) else x.read_only
        if donated[i] and (not donate or i in shared or fixed):
            arrays[i] = x.copy()


def invalidate_donated_arrays(
    arguments: Sequence[Argument], values: Sequence[Any], arrays: list[Any], donate: bool, now: bool = True
) -> None:
    """Make the caller's donated device arrays unusable; replace them in ``arrays`` by new objects of the same memory.

    A donated array is invalidated even if the call made a copy and need not overwrite it, so that no caller can depend
    on that. With ``now`` False, earlier submissions can still read the arrays.
    """
    if not donate:
        return
    donated = {id(v): v for a, v in zip(arguments, values) if a.donated and isinstance(v, DeviceArray)}
    for value in donated.values():
        other = value.give_away(now)
        arrays[:] = [other if x is value else x for x in arrays]


def indices_that_share_memory(arrays: Sequence[Any]) -> set[int]:
    """Return the indices of contiguous arrays that overlap another one in memory."""
    starts = [address_of(x) if isinstance(x, np.ndarray) else x.address for x in arrays]
    sizes = [x.nbytes for x in arrays]
    extents = sorted([(start, start + size, i) for i, (start, size) in enumerate(zip(starts, sizes)) if size])
    found, reached = set(), 0
    for (start, end, i), after in zip(extents, [*extents[1:], None]):
        if start < reached or (after is not None and after[0] < end):
            found.add(i)
        reached = max(reached, end)
    return found


def check_output_buffer(out: Any, dtype: np.dtype, shape: tuple[int, ...], number: int, where: str) -> None:
    """Refuse an ``out=`` buffer that a result cannot be written to.

    Raises
    ------
    CallError
        Its message has the result, the found type and the expected type.
    """
    if out.dtype != dtype or out.shape != shape:
        found, expected = type_text(dtype_text(out.dtype), out.shape), type_text(dtype_text(dtype), shape)
        raise ArgumentValueError(where, f"out[{number}] does not fit result {number}", found, expected)
    if type(out) is np.ndarray and (out.flags.num & GOOD_FLAGS != GOOD_FLAGS or not out.flags.writeable):
        raise ArgumentValueError(where, f"out[{number}] is not contiguous, aligned and writable", hint="np.empty(...)")


def check_output_buffers(
    out: Any, count: int, arrays: Sequence[Any], where: str, gpus: Sequence[int] = ()
) -> Sequence[Any]:
    """Return the ``out=`` buffers of ``count`` results as NumPy or GPU arrays; None for results without a buffer.

    Raises
    ------
    CallError
        If they are not a sequence of length ``count``, one is not writable from its result's device (``gpus``), or one
        shares memory with an argument or another buffer.
    """
    if out is None:
        return [None] * count
    if not isinstance(out, Sequence):
        raise ArgumentError(where, "out is not a sequence of buffers", type(out).__name__, "a list or tuple")
    if len(out) != count:
        raise ArgumentError(where, "wrong number of out buffers", len(out), count)
    places = gpus or [-1] * count
    found = [x if x is None else _import_output_buffer(x, gpu, n, where) for n, (x, gpu) in enumerate(zip(out, places))]
    given = [(i, x) for i, x in enumerate(found) if x is not None]
    shared = indices_that_share_memory([*arrays, *(x for _, x in given)]) if given else set()
    for number, (i, _) in enumerate(given, len(arrays)):
        if number in shared:
            raise ArgumentValueError(where, f"out[{i}] shares memory with an argument or another result")
    return found


def _import_output_buffer(out: Any, gpu: int, number: int, where: str) -> Any:
    """Import an ``out=`` buffer as an array that a result on GPU ``gpu`` (-1: host memory) can be written to."""
    if type(out) is np.ndarray:
        return out
    label = f"out[{number}]"
    try:
        found = out if isinstance(out, DeviceArray) else _import_writable_array(out)
    except Exception as error:  # it runs code of the buffer's class
        raise ArgumentError(where, f"{label} cannot be written to: {error}") from error
    if found is None:
        raise ArgumentError(where, f"{label} is not a writable array", type(out).__name__, "np.empty(...)")
    if isinstance(found, np.ndarray):
        return found
    if found.donated:
        raise CallError(where, f"{label} was donated to a call", hint="a result of that call")
    if found.ordinal not in (-1, gpu):
        home = f"on GPU {gpu}" if gpu >= 0 else "in memory of the host"
        raise ArgumentValueError(
            where, f"{label} is on another device than result {number}", f"GPU {found.ordinal}", home
        )
    return found.numpy() if found.ordinal < 0 else found


def _import_writable_array(out: Any) -> Any:
    """Import a buffer of another library as a writable array of the same memory; None if that is not possible."""
    from aotc.vmfb.devices.cuda.foreign import imported_array  # only for such buffers
    from aotc.vmfb.devices.host_arrays import import_host_array

    if isinstance(out, np.ndarray | np.generic):
        return None
    found = imported_array(out, writes=True)
    return import_host_array(out, writes=True) if found is None else found


class Signature:
    """The arguments and results of a function; ``repr`` shows it as ``name(x: f32[n]) -> f32[n]``.

    Attributes
    ----------
    name : str
    arguments, results : list of dict
        Entries of the manifest: name, dtype, dims (and donated).
    in_tree, out_tree : dict or None
        Pytree nodes, see :mod:`aotc.vmfb.trees`.
    parameters : list of str
        Names of the positional parameters, empty if unknown.
    doc : str
        The docstring of the function that was compiled.
    state : dict of str to str
        Maps a result to the argument of the next call that it becomes, as declared to the compiler.
    typical : dict of str to int
        Typical sizes of symbolic dims, as declared to the compiler.
    """

    def __init__(self, name: str, entry: dict[str, Any]) -> None:
        self.name = name
        self.arguments: list[dict[str, Any]] = entry["arguments"]
        self.results: list[dict[str, Any]] = entry["results"]
        self.in_tree: dict[str, Any] | None = entry.get("in_tree")
        self.out_tree: dict[str, Any] | None = entry.get("out_tree")
        self.parameters: list[str] = entry.get("parameters", [])
        self.doc: str = entry.get("doc", "")
        self.state: dict[str, str] = entry.get("state", {})
        self.typical: dict[str, int] = entry.get("typical", {})

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Return the types of the arguments."""
        return tuple(map(tensor_spec_of_row, self.arguments))

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Return the types of the results."""
        return tuple(map(tensor_spec_of_row, self.results))

    def __repr__(self) -> str:
        takes = ", ".join(
            f"{a['name']}: {type_text(a['dtype'], a['dims'])}"
            f"{_partition_of_entry(a)}{' donated' * a['donated']}{_device_of_entry(a)}"
            for a in self.arguments
        )
        gives = ", ".join(
            (f"{r['name']}: " if r["name"] else "")
            + type_text(r["dtype"], r["dims"])
            + _partition_of_entry(r)
            + _device_of_entry(r)
            for r in self.results
        )
        return f"{self.name}({takes}) -> ({gives})"


def _partition_of_entry(entry: dict[str, Any]) -> str:
    layout = layout_of(entry.get("layout", ()))
    return _partition_text(entry["dtype"], entry["whole"], layout) if "whole" in entry else ""


def _device_of_entry(entry: dict[str, Any]) -> str:
    return f" on {entry['device']}" if "device" in entry else ""
