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
    """Builder of the ops of one batch normalization: statistics over all dims but the feature dim."""

    def __init__(self, state: ImportState, op: Any) -> None:
        self.state = state
        self.x = state.value(op.operands[0])
        self.feature = op.attributes["feature_index"].value
        self.epsilon = op.attributes["epsilon"].value
        self.others = tuple(i for i in range(self.x.type.rank) if i != self.feature)

    def feature_vectors(self, values: Sequence[Value]) -> list[Value]:
        """Require that ``values`` are vectors with one element per feature, and return them."""
        return [require_shape(self.state, v, (self.x.type.shape[self.feature],)) for v in values]

    def broadcast_vector(self, v: Value) -> Value:
        """Broadcast a vector over features to the input's shape."""
        return self.state.one("broadcast", [v], {"dims": (self.feature,)}, [self.x.type])

    def constant_of_shape(self, value: float, shape: Sequence[Dim]) -> Value:
        dtype = self.x.type.dtype
        return self.state.constant(np.array(value).astype(to_numpy(dtype)), TensorType(dtype, tuple(shape)))

    def count(self) -> Value:
        """Return the number of elements of each feature, as a vector."""
        size = product(self.x.type.shape[i] for i in self.others)
        vector = (self.x.type.shape[self.feature],)
        if not isinstance(size, Expr):
            return self.constant_of_shape(size, vector)
        scalar = self.state.one("dim", (), {"expr": size}, [TensorType("i64")])
        return self.state.broadcast_scalar(self.state.convert(scalar, self.x.type.dtype), vector)

    def sum_per_feature(self, v: Value) -> Value:
        """Return the sum over all dims but the feature dim."""
        return sum_over(self.state, v, self.others)

    def inverse_deviation(self, variance: Value) -> Value:
        return self.state.one(
            "rsqrt", [self.state.one("add", [variance, self.constant_of_shape(self.epsilon, variance.type.shape)])]
        )

    def mean_and_variance(self) -> tuple[Value, Value]:
        """Return mean and variance of the input, as vectors over features."""
        state, count = self.state, self.count()
        mean = state.one("div", [self.sum_per_feature(self.x), count])
        centred = state.one("sub", [self.x, self.broadcast_vector(mean)])
        return mean, state.one("div", [self.sum_per_feature(state.one("mul", [centred, centred])), count])

    def normalize(self, mean: Value, variance: Value, scale: Value, offset: Value) -> Value:
        """Return ``(x - mean) / sqrt(variance + epsilon) * scale + offset``."""
        state = self.state
        centred = state.one("sub", [self.x, self.broadcast_vector(mean)])
        factor = state.one("mul", [self.inverse_deviation(variance), scale])
        product = state.one("mul", [centred, self.broadcast_vector(factor)])
        return state.one("add", [product, self.broadcast_vector(offset)])


def _import_inference(state: ImportState, op: Any) -> None:
    norm = _BatchNorm(state, op)
    scale, offset, mean, variance = norm.feature_vectors(state.operands(op)[1:])
    state.bind(op, [norm.normalize(mean, variance, scale, offset)])


def _import_training(state: ImportState, op: Any) -> None:
    """Import ``batch_norm_training``: the normalized operand, the mean and the variance."""
    norm = _BatchNorm(state, op)
    scale, offset = norm.feature_vectors(state.operands(op)[1:])
    mean, variance = norm.mean_and_variance()
    state.bind(op, [norm.normalize(mean, variance, scale, offset), mean, variance])


def _import_gradient(state: ImportState, op: Any) -> None:
    """Import the gradients of a batch normalization in training for its input, scale and offset."""
    norm, one = _BatchNorm(state, op), state.one
    scale, mean, variance = norm.feature_vectors(state.operands(op)[1:4])
    upstream = require_shape(state, state.operands(op)[4], norm.x.type.shape)
    inverse = norm.inverse_deviation(variance)
    unit = one("mul", [one("sub", [norm.x, norm.broadcast_vector(mean)]), norm.broadcast_vector(inverse)])
    d_offset = norm.sum_per_feature(upstream)
    d_scale = norm.sum_per_feature(one("mul", [upstream, unit]))
    count = norm.count()
    drift = one("add", [norm.broadcast_vector(one("div", [d_offset, count])),
                        one("mul", [unit, norm.broadcast_vector(one("div", [d_scale, count]))])])  # fmt: skip
    d_x = one("mul", [one("sub", [upstream, drift]), norm.broadcast_vector(one("mul", [scale, inverse]))])
    state.bind(op, [d_x, d_scale, d_offset])


REDUCTION_BATCH_NORM: dict[str, Importer] = {
    "stablehlo.batch_norm_inference": _import_inference,
    "stablehlo.batch_norm_training": _import_training,
    "stablehlo.batch_norm_grad": _import_gradient,
}
