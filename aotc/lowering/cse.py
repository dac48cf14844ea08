"""Compute equal things once: an op with the same operands and attributes as an earlier one becomes it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aotc.frontend.tensor_ir import Module, Op, Region, Value
from aotc.lowering.dce import has_effect
from aotc.options import Options

_UNIQUE = frozenset({"call", "custom_call", "rng", "while", "case"})


def cse(module: Module, options: Options) -> Module:
    """Return ``module`` without repeated ops; an op of an outer region counts inside nested ones."""
    digests: dict[int, tuple] = {}
    changed = {n: replace(f, body=_Scope(digests).region(f.body, {})) for n, f in module.functions.items()}
    return module.with_functions(changed)


class _Scope:
    def __init__(self, digests: dict[int, tuple]) -> None:
        self.digests = digests
        self.mapped: dict[Value, Value] = {}

    def region(self, region: Region, outer: Mapping[Any, Sequence[Value]]) -> Region:
        known = dict(outer)
        ops = []
        for op in region.ops:
            operands = tuple(self.mapped.get(v, v) for v in op.operands)
            regions = tuple(self.region(r, known) for r in op.regions)
            op = replace(op, operands=operands, regions=regions) if operands != op.operands or regions else op
            if op.name in _UNIQUE or has_effect(op):
                ops.append(op)
                continue
            key = self.key(op, {})
            found = known.get(key)
            if found is None:
                known[key] = op.results
                ops.append(op)
            else:
                self.mapped.update(zip(op.results, found))
        return Region(region.params, tuple(ops), tuple(self.mapped.get(v, v) for v in region.results))

    def key(self, op: Op, numbers: dict[Value, int]) -> tuple:
        operands = tuple(numbers.get(v, v) for v in op.operands)
        regions = tuple(self.region_key(r, numbers) for r in op.regions)
        return (op.name, operands, self.frozen(op.attrs), tuple(v.type for v in op.results), regions)

    def region_key(self, region: Region, outer: dict[Value, int]) -> tuple:
        """Return the structure of ``region`` with its own values by number."""
        numbers = dict(outer)
        for p in region.params:
            numbers[p] = len(numbers)
        ops = []
        for op in region.ops:
            ops.append(self.key(op, numbers))
            for v in op.results:
                numbers[v] = len(numbers)
        types = tuple(p.type for p in region.params)
        return types, tuple(ops), tuple(numbers.get(v, v) for v in region.results)

    def frozen(self, data: Any) -> Any:
        match data:
            case Mapping():
                return tuple((k, self.frozen(data[k])) for k in sorted(data))
            case tuple() | list():
                return tuple(map(self.frozen, data))
            case np.ndarray():
                if id(data) not in self.digests:
                    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
                    self.digests[id(data)] = (str(data.dtype), data.shape, hashlib.sha1(raw.data).hexdigest())
                return self.digests[id(data)]
            case bool() | float():
                return (type(data).__name__, repr(data))
        return data
