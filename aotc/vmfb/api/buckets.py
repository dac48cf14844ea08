"""Functions that a bundle has once for each of several sizes: each call runs the one for its sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.api.partial import Made, PartialFunction, bind_placed_arguments
from aotc.vmfb.arguments import Argument, Signature, type_text
from aotc.vmfb.errors import ArgumentValueError

if TYPE_CHECKING:
    from aotc.vmfb.devices.array import DeviceArray
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.interfaces import Executable, FunctionResidence, FunctionTable, RuntimeFunction
    from aotc.vmfb.profile.trace import Stepper

Sizes = Mapping[str, int]
PART, WHOLE = "dims", "whole"
"""Which shapes of a signature's rows arrays have: those of a rank's parts, or of whole arrays."""


def bucket_names(functions: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Sizes]]:
    """Return the buckets of each function that has some, and the sizes of each, of the functions of a manifest."""
    found: dict[str, dict[str, Sizes]] = {}
    for name, entry in functions.items():
        if bucket := entry.get("bucket"):
            found.setdefault(bucket["function"], {})[name] = bucket["sizes"]
    return {whole: dict(sorted(rows.items(), key=lambda row: [*row[1].values()])) for whole, rows in found.items()}


class Buckets:
    """The buckets of a function.

    Attributes
    ----------
    name : str
        The name of the function.
    sizes : dict of str to (dict of str to int)
        The sizes of each bucket.
    signatures : dict of str to Signature
    signature : Signature
        The signature of the function, with expressions in place of the sizes that differ. Commands assume the sizes of
        the last bucket.
    """

    def __init__(self, name: str, where: str, sizes: Mapping[str, Sizes], signatures: Mapping[str, Signature]) -> None:
        self.name, self.where, self.sizes = name, where, dict(sizes)
        self.signatures = {bucket: signatures[bucket] for bucket in sizes}
        self._keys: dict[tuple[str, str], tuple[list[tuple[int, int]], dict[tuple[int, ...], str]]] = {}
        for kind in (PART, WHOLE):
            for side in ("arguments", "results"):
                self._keys[side, kind] = self._keys_of(side, kind)

    def _keys_of(self, side: str, kind: str) -> tuple[list[tuple[int, int]], dict[tuple[int, ...], str]]:
        """Return the places of the dims that differ between buckets, and the bucket of each tuple of their sizes."""
        shapes = {name: [_shape(row, kind) for row in getattr(s, side)] for name, s in self.signatures.items()}
        first = next(iter(shapes.values()))
        places = [
            (n, k) for n, shape in enumerate(first) for k in range(len(shape))
            if len({own[n][k] for own in shapes.values()}) > 1
        ]  # fmt: skip
        return places, {tuple(own[n][k] for n, k in places): name for name, own in reversed(shapes.items())}

    def of_arguments(self, values: Sequence[Any], kind: str = PART) -> str:
        """Return the bucket for the shapes of flat arguments.

        Raises
        ------
        ArgumentValueError
            If there is none; it lists the buckets.
        """
        return self._chosen("arguments", values, kind)

    def of_results(self, values: Sequence[Any], kind: str = PART) -> str:
        """Return the bucket for the shapes of flat results."""
        return self._chosen("results", values, kind)

    def _chosen(self, side: str, values: Sequence[Any], kind: str) -> str:
        places, names = self._keys[side, kind]
        try:
            return names[tuple([values[n].shape[k] for n, k in places])]
        except (AttributeError, IndexError, KeyError, TypeError):
            pass
        if len(values) != len(getattr(self.signature, side)):  # the function itself reports the number
            return next(iter(self.signatures))
        shapes = [np.shape(value) for value in values]
        sizes = tuple(shapes[n][k] for n, k in places if k < len(shapes[n]))
        if sizes in names:
            return names[sizes]
        raise self._error_of_sizes(side, places, shapes, kind)

    def _error_of_sizes(
        self, side: str, places: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, ...]], kind: str
    ) -> ArgumentValueError:
        """Return the error for arrays without a bucket: the first array whose own shape no bucket has, if any."""
        numbers = list(dict.fromkeys(n for n, _ in places))
        rows = {name: getattr(signature, side) for name, signature in self.signatures.items()}
        known = {n: [_shape(own[n], kind) for own in rows.values()] for n in numbers}
        number = next((n for n in numbers if shapes[n] not in known[n]), numbers[0])
        row = next(iter(rows.values()))[number]
        label = f"{side[:-1]} {number}" + (f" ({row['name']})" if row["name"] else "")
        pairs = zip(known[number], self.sizes.values(), strict=True)
        expected = "; ".join(f"{type_text(row['dtype'], shape)} for {_sizes_text(sizes)}" for shape, sizes in pairs)
        is_new = shapes[number] not in known[number]
        what = f"{label} has a size without a bucket" if is_new else f"the sizes of {side} are of several buckets"
        symbols = ", ".join(f"{symbol!r}: (...)" for symbol in self._symbols)
        hint = f"pad the arrays to one of these sizes, or compile with more: specialize={{{symbols}}}"
        return ArgumentValueError(self.where, what, type_text(row["dtype"], shapes[number]), expected, hint)

    @property
    def _symbols(self) -> list[str]:
        return list(next(iter(self.sizes.values())))

    @cached_property
    def signature(self) -> Signature:
        """The signature of the function, with expressions in place of the sizes that differ."""
        every = list(self.signatures.values())
        found = Signature(self.name, {"arguments": [], "results": []})
        found.__dict__.update({**every[0].__dict__, "name": self.name, "typical": dict([*self.sizes.values()][-1])})
        found.arguments = [self._general_row([s.arguments[n] for s in every]) for n in range(len(every[0].arguments))]
        found.results = [self._general_row([s.results[n] for s in every]) for n in range(len(every[0].results))]
        return found

    def _general_row(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the row of an argument or result for all buckets, of which ``rows`` has one for each."""
        same = all(row.get("layout") == rows[0].get("layout") for row in rows)
        kept = {key: value for key, value in rows[0].items() if same or key not in ("layout", "whole")}
        for key in ("dims", "whole"):
            if key in kept:
                kept[key] = [self._size_text([row[key][k] for row in rows]) for k in range(len(kept[key]))]
        return kept

    def _size_text(self, sizes: Sequence[int]) -> int | str:
        """Return the size of a dim in each bucket as an expression in one symbol, or ``?``."""
        if len(set(sizes)) == 1:
            return sizes[0]
        for symbol in self._symbols:
            numbers = [own[symbol] for own in self.sizes.values()]
            ratios = {Fraction(size, n) for size, n in zip(sizes, numbers, strict=True)}
            differences = {size - n for size, n in zip(sizes, numbers, strict=True)}
            if len(ratios) == 1:
                ratio = ratios.pop()
                times = f"{ratio.numerator}*{symbol}" if ratio.numerator > 1 else symbol
                return f"{times}/{ratio.denominator}" if ratio.denominator > 1 else times
            if len(differences) == 1:
                difference = differences.pop()
                return f"{symbol} {'+' if difference > 0 else '-'} {abs(difference)}"
        return "?"


def _shape(row: Mapping[str, Any], kind: str) -> tuple[int, ...]:
    return tuple(row.get(kind, row["dims"]))


def _sizes_text(sizes: Sizes) -> str:
    return ", ".join(f"{symbol}={size}" for symbol, size in sizes.items())


class BucketedFunction:
    """A function of a loaded module that runs, for each call, the bucket for its sizes.

    It has the interface of :class:`aotc.vmfb.vm.LoadedFunction`.

    Attributes
    ----------
    buckets : Buckets
    functions : dict of str to RuntimeFunction
        The function of each bucket.
    """

    resident = None
    has_early_results = False

    def __init__(self, buckets: Buckets, functions: Mapping[str, RuntimeFunction]) -> None:
        self.buckets = buckets
        self.functions = {name: functions[name] for name in buckets.sizes}
        self._first = next(iter(self.functions.values()))
        self.name, self.where, self.signature = buckets.name, buckets.where, buckets.signature
        self.arguments = [Argument(n, row) for n, row in enumerate(self.signature.arguments)]

    @property
    def executable(self) -> Executable:
        """The code of all buckets."""
        return self._first.executable

    @property
    def result_dtypes(self) -> list[np.dtype]:
        """The dtypes of the results."""
        return self._first.result_dtypes

    @property
    def residence(self) -> FunctionResidence:
        """The memory of each argument and result."""
        return self._first.residence

    @property
    def direct(self) -> BucketedFunction:
        """The function that submissions run."""
        return self

    @property
    def recordings(self) -> int:
        """Zero: the functions of the buckets count their own."""
        return 0

    def _chosen(self, values: Sequence[Any]) -> RuntimeFunction:
        return self.functions[self.buckets.of_arguments(values)]

    def call(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.call`."""
        return self._chosen(values).call(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run`."""
        return self._chosen(values).run(values, out, donate, results)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run_early`."""
        return self._chosen(values).run_early(values, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.trace`."""
        return self._chosen(values).trace(values, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.step`."""
        return self._chosen(values).step(values, make)

    def check_ahead(self) -> None:
        """Do nothing: the functions of the buckets are checked by themselves."""


def has_buckets(function: object) -> bool:
    """Return True if a function is one for several sizes, and not one of its buckets."""
    return isinstance(function, BucketedFunction)


def bucketed_functions(
    functions: Mapping[str, Mapping[str, Any]], loaded: Mapping[str, RuntimeFunction], module: str
) -> dict[str, Any]:
    """Return a :class:`BucketedFunction` for each function of a manifest that has buckets, by name."""
    found: dict[str, Any] = {}
    for name, sizes in bucket_names(functions).items():
        signatures = {bucket: loaded[bucket].signature for bucket in sizes}
        found[name] = BucketedFunction(Buckets(name, f"{module}.{name}", sizes, signatures), loaded)
    return found


def bound_with_buckets(
    module: FunctionTable, name: str, held: Mapping[int, DeviceArray], made: Made
) -> PartialFunction:
    """Bind arguments as :func:`.bind_placed_arguments` does, also those of a function with buckets."""
    function, whole = module.get_function(name), bind_placed_arguments(module, name, held, made)
    if not isinstance(function, BucketedFunction):
        return whole
    partials = {own: bind_placed_arguments(module, own, held, made) for own in function.functions}
    return BucketedPartial(function, whole, partials)


class BucketedPartial(PartialFunction):
    """Bound arguments of a function with buckets: values that depend on them alone are computed once for all."""

    def __init__(
        self, function: BucketedFunction, whole: PartialFunction, partials: Mapping[str, PartialFunction]
    ) -> None:
        super().__init__(whole.function, whole.row, whole.open, whole.arrays)
        self._buckets, self._partials = function.buckets, partials

    def call(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`PartialFunction.call`."""
        return self._partials[self._buckets.of_arguments(self.complete_arguments(values))].call(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """See :meth:`PartialFunction.run`."""
        bucket = self._buckets.of_arguments(self.complete_arguments(values))
        return self._partials[bucket].run(values, out, donate, results)
