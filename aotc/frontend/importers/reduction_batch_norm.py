"""Import of batch normalization (inference, training, gradient) as elementwise ops and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.requirements import require_shape
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim, Expr, product
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import to_numpy


class _BatchNorm:
    """Builder for one batch normalization: statistics over all dims but the feature dim."""

    def __init__(self, state: ImportState, op: Any) -> None:
        self.state = state
        self.x = state.value(op.operands[0])
        self.feature = op.attributes["feature_index"].value
        self.epsilon = op.attributes["epsilon"].value
        self.others = tuple(i for i in range(self.x.type.rank) if i != self.feature)

    def vectors(self, values: Sequence[Value]) -> list[Value]:
        """Return ``values``, required to be vectors with one element per feature."""
        return [require_shape(self.state, v, (self.x.type.shape[self.feature],)) for v in values]

    def spread(self, v: Value) -> Value:
        """Broadcast a vector over features to the input's shape."""
        return self.state.one("broadcast", [v], {"dims": (self.feature,)}, [self.x.type])

    def number(self, value: float, shape: Sequence[Dim]) -> Value:
        dtype = self.x.type.dtype
        return self.state.constant(np.array(value).astype(to_numpy(dtype)), TensorType(dtype, tuple(shape)))

    def count(self) -> Value:
        """Return the number of elements of each feature, as a vector."""
        size = product(self.x.type.shape[i] for i in self.others)
        vector = (self.x.type.shape[self.feature],)
        if not isinstance(size, Expr):
            return self.number(size, vector)
        scalar = self.state.one("dim", (), {"expr": size}, [TensorType("i64")])
        return self.state.broadcast_scalar(self.state.convert(scalar, self.x.type.dtype), vector)

    def total(self, v: Value) -> Value:
        """Return the sum over all dims but the feature dim."""
        return sum_over(self.state, v, self.others)

    def inverse_deviation(self, variance: Value) -> Value:
        return self.state.one(
            "rsqrt", [self.state.one("add", [variance, self.number(self.epsilon, variance.type.shape)])]
        )

    def moments(self) -> tuple[Value, Value]:
        state, count = self.state, self.count()
        mean = state.one("div", [self.total(self.x), count])
        centred = state.one("sub", [self.x, self.spread(mean)])
        return mean, state.one("div", [self.total(state.one("mul", [centred, centred])), count])

    def scaled(self, mean: Value, variance: Value, scale: Value, offset: Value) -> Value:
        state = self.state
        centred = state.one("sub", [self.x, self.spread(mean)])
        factor = state.one("mul", [self.inverse_deviation(variance), scale])
        return state.one("add", [state.one("mul", [centred, self.spread(factor)]), self.spread(offset)])


def _import_inference(state: ImportState, op: Any) -> None:
    norm = _BatchNorm(state, op)
    scale, offset, mean, variance = norm.vectors(state.operands(op)[1:])
    state.bind(op, [norm.scaled(mean, variance, scale, offset)])


def _import_training(state: ImportState, op: Any) -> None:
    norm = _BatchNorm(state, op)
    scale, offset = norm.vectors(state.operands(op)[1:])
    mean, variance = norm.moments()
    state.bind(op, [norm.scaled(mean, variance, scale, offset), mean, variance])


def _import_gradient(state: ImportState, op: Any) -> None:
    norm, one = _BatchNorm(state, op), state.one
    scale, mean, variance = norm.vectors(state.operands(op)[1:4])
    upstream = require_shape(state, state.operands(op)[4], norm.x.type.shape)
    inverse = norm.inverse_deviation(variance)
    unit = one("mul", [one("sub", [norm.x, norm.spread(mean)]), norm.spread(inverse)])
    d_offset = norm.total(upstream)
    d_scale = norm.total(one("mul", [upstream, unit]))
    count = norm.count()
    drift = one("add", [norm.spread(one("div", [d_offset, count])),
                        one("mul", [unit, norm.spread(one("div", [d_scale, count]))])])  # fmt: skip
    d_x = one("mul", [one("sub", [upstream, drift]), norm.spread(one("mul", [scale, inverse]))])
    state.bind(op, [d_x, d_scale, d_offset])


REDUCTION_BATCH_NORM: dict[str, Importer] = {
    "stablehlo.batch_norm_inference": _import_inference,
    "stablehlo.batch_norm_training": _import_training,
    "stablehlo.batch_norm_grad": _import_gradient,
}
