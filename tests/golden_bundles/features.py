"""Models of the golden bundles beyond the first eight: one or two features of the bundle format each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import export, lax

from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

Reference = Callable[..., Any]
V3 = "cpu:x86-64-v3"
W = (np.arange(32, dtype="f4").reshape(8, 4) % 7 - 3) / 4
X = (np.arange(24, dtype="f4").reshape(3, 8) % 5 - 2) / 2
PARAMS = {"w": W, "bias": np.linspace(-1, 1, 4, dtype="f4")}


@dataclass(frozen=True)
class Golden:
    """A model, the options it is compiled with, and calls.

    Attributes
    ----------
    model : function, text, export, or mapping of str to function
    examples : sequence
        Example arguments of the function; of several functions by name.
    calls : mapping of str to sequence
        Flat arguments of calls of each function, for the reference; of a stateful one without the state.
    reference : mapping of str to callable
        What computes the results; by default XLA, of the model as it is.
    options : mapping
        Of ``aotc.compile``. ``weights`` that is no word is the name of a file next to the bundle.
    given : sequence of int
        The arguments of a call that the bundle has itself: they are not stored.
    """

    model: Any
    calls: Mapping[str, Sequence[Sequence[Any]]]
    examples: Any = ()
    reference: Mapping[str, Reference] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    given: Sequence[int] = ()


def xla(model: Any) -> Reference:
    """Return a function that runs a model with XLA."""
    if isinstance(model, str):
        return lambda *arguments: run_xla(fetch(model), list(arguments))
    return lambda *arguments: jax.tree.leaves(jax.jit(model)(*arguments))


def layer(params: Any, x: Any) -> Any:
    """One layer of a network."""
    return jnp.tanh(x @ params["w"] + params["bias"])


def several(
    reference: Mapping[str, Reference] | None = None, /, options: Any = None, **functions: tuple[Any, Sequence[Any]]
) -> Golden:
    """Return several functions with the flat arguments of their calls as the models of one bundle."""
    models = {name: model for name, (model, _) in functions.items()}
    calls = {name: rows for name, (_, rows) in functions.items()}
    examples = {name: tuple(rows[0]) for name, rows in calls.items()}
    reference = reference or {name: xla(model) for name, model in models.items()}
    return Golden(models, calls, examples, reference, options or {})


def of_leaves(bias: Any, w: Any, x: Any) -> Any:
    """Compute :func:`layer` of flat arguments, in the order of its pytree."""
    return layer({"bias": bias, "w": w}, x)


LAYER = [[PARAMS["bias"], PARAMS["w"], X], [PARAMS["bias"], PARAMS["w"], X[::-1] * 3]]


def decode(cache: Any, x: Any) -> Any:
    """Append to a buffer that the next call takes."""
    k = cache["k"].at[cache["n"]].set(x * 2)
    return {"sum": k.sum(0), "cache": {"k": k, "n": cache["n"] + 1}}


def decoded(*rows: np.ndarray) -> list[list[np.ndarray]]:
    """Return results of :func:`decode` for calls one after the other."""
    return [[np.sum([2 * r for r in rows[: n + 1]], 0, dtype="f4")] for n in range(len(rows))]


def small_loop(n: Any, x: Any) -> Any:
    """Iterate within one kernel."""
    return lax.fori_loop(0, n, lambda i, y: y * 1.5 - i, x)


def carried(x: Any, limit: Any) -> Any:
    """Fill a carried buffer until a value that only the loop computes."""

    def body(state: Any) -> Any:
        k, y, buffer = state
        y = jnp.tanh(y @ (W @ W.T)) + 1
        return k + 1, y, lax.dynamic_update_slice(buffer, y[None], (k, 0, 0))

    start = jnp.int32(0), x, jnp.zeros((6, *x.shape), x.dtype)
    return lax.while_loop(lambda s: (s[0] < 6) & (s[1].sum() < limit), body, start)


def conditionals(flag: Any, i: Any, x: Any) -> Any:
    """A small branch, and one whose cases need kernels of their own."""
    y = lax.cond(flag, lambda v: v + 1, lambda v: v * 2, x)
    return lax.switch(i, [lambda v: jnp.sort(v, 1), lambda v: jnp.cumsum(v, 0), lambda v: v @ (W @ W.T)], y)


def low_precision(b: Any, h: Any, e: Any, q: Any) -> Any:
    """Arithmetic of types with few bits."""
    return b * 2 + b, h @ h.T, (e.astype("f4") * 3).astype(e.dtype), q + q, q.astype(jnp.int32) * 5


def low_arguments() -> list[Any]:
    """Values that all types of :func:`low_precision` have exactly."""
    values = np.array([[1, -2, 3], [0, 1, -1]])
    types = (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4)
    return [values.astype(t) for t in types]


def quantized_weights() -> np.ndarray:
    """Weights that 8 bits with a scale of 1 for each column hold exactly."""
    w = np.random.default_rng(3).integers(-127, 128, (272, 64)).astype("f4")
    w[0] = 127
    return w


def spectrum(z: Any) -> Any:
    """Complex arithmetic and a transform."""
    return jnp.fft.fft(z * (1 - 2j)), jnp.abs(z), jnp.real(z @ z.T)


def scaled_sum(x: Any, out: Any, *, scale: Any) -> None:
    """Sum rows, as a custom call that Numba compiles."""
    for row in range(x.shape[0]):
        total = 0.0
        for k in range(x.shape[1]):
            total += scale * x[row, k]
        out[row] = total


def native_call(x: Any) -> Any:
    """Call a function that is compiled into the bundle."""
    return jax.ffi.ffi_call("golden_scaled_sum", jax.ShapeDtypeStruct((3,), np.float32))(x, scale=0.5) + 1


def bound_call(x: Any) -> Any:
    """Call a function that is given when the bundle is loaded."""
    return jax.ffi.ffi_call("golden_counts", jax.ShapeDtypeStruct((4,), np.int32))(x)


COLLECTIVES = """
func.func @main(%x: tensor<4x4xf32>) -> (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>) {
  %s = "stablehlo.all_reduce"(%x) ({
  ^bb0(%p: tensor<f32>, %q: tensor<f32>):
    %t = stablehlo.add %p, %q : tensor<f32>
    stablehlo.return %t : tensor<f32>
  }) {replica_groups = dense<0> : tensor<1x1xi64>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %g = "stablehlo.all_gather"(%x) {all_gather_dim = 0 : i64, replica_groups = dense<0> : tensor<1x1xi64>}
    : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %p = "stablehlo.collective_permute"(%x) {source_target_pairs = dense<0> : tensor<1x2xi64>}
    : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d = stablehlo.add %s, %s : tensor<4x4xf32>
  return %d, %g, %p : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>
}
"""
DEVICES = """
func.func @main(%x: tensor<3x8xf32> {aotc.affinity = "d0"}, %w: tensor<8x4xf32> {aotc.affinity = "d1"})
    -> tensor<3x4xf32> {
  %0 = stablehlo.add %x, %x : tensor<3x8xf32>
  %1 = stablehlo.custom_call @aotc.transfer(%0) {aotc.to = "d1"} : (tensor<3x8xf32>) -> tensor<3x8xf32>
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST]
    : (tensor<3x8xf32>, tensor<8x4xf32>) -> tensor<3x4xf32>
  return %2 : tensor<3x4xf32>
}
"""
CHECKED = """
func.func @main(%x: tensor<3x8xf32>, %i: tensor<i32>) -> tensor<3x8xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %ok = stablehlo.compare GE, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%ok, %i) {api_version = 2 : i32, has_side_effect = true,
    error_message = "the number is negative: {0}"} : (tensor<i1>, tensor<i32>) -> ()
  %f = stablehlo.convert %i : (tensor<i32>) -> tensor<f32>
  %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<3x8xf32>
  %y = stablehlo.multiply %x, %b : tensor<3x8xf32>
  return %y : tensor<3x8xf32>
}
"""


def ragged(x: Any, y: Any) -> Any:
    """Sizes that are computed from two symbols."""
    return jnp.concatenate([x, y]).reshape(-1), (x.T @ x).sum(0)


def exported(function: Callable[..., Any], *shapes: str) -> Any:
    """Export a function of f32 arrays; names in ``shapes`` are symbolic dims of one scope."""
    scope = export.SymbolicScope()
    arguments = [jax.ShapeDtypeStruct(export.symbolic_shape(s, scope=scope), np.float32) for s in shapes]
    return export.export(jax.jit(function))(*arguments)


def softmax_layer(x: Any) -> Any:
    """A layer with its own constants."""
    return jax.nn.softmax(x @ W)


def permuted(x: Any) -> Any:
    """Operands of products and a sort that are stored compressed, next to one that is not."""
    order = np.random.default_rng(6).permutation(200)
    near = np.abs(np.subtract.outer(order, order[:100])) < 20
    noise = np.random.default_rng(7).standard_normal((100, 9)).astype("f4")
    return jnp.tanh(x @ np.eye(200, dtype="f4")[order] @ near.astype("f4")) @ noise, jnp.sort(near * x[0, :100], 1)


def tensor_cores(x: Any) -> Any:
    """A product that tensor cores compute, on tiles that Hopper copies by tensor maps."""
    return x @ jnp.asarray(np.eye(128), jnp.bfloat16)


def gpu(x: Any, y: Any) -> Any:
    """What a GPU runs as a kernel for elements, a sum and a product."""
    return jnp.tanh(x) * 2 + x, x.sum(1), jnp.dot(x, y, precision="highest")


def of_weights() -> dict[str, Golden]:
    """Return the models that have weights or a state, by the names of their bundles."""
    rows = [np.full(3, n, "f4") for n in (1, 2, 5)]
    cache = {"k": np.zeros((4, 3), "f4"), "n": np.int32(0)}
    quantized, few = quantized_weights(), np.random.default_rng(4).integers(-3, 4, (2, 272)).astype("f4")
    noise = np.random.default_rng(5).standard_normal((64, 20)).astype("f4")
    leaves = {"main": xla(of_leaves)}
    return {
        "bound": Golden(layer, {"main": LAYER}, (PARAMS, X), leaves, {"bind": ["params"]}),
        "own_weights": Golden(
            layer, {"main": LAYER}, (PARAMS, X), leaves, {"bind": ["params"], "weights": "unpacked"}, (0, 1)
        ),
        "own_file": Golden(
            layer, {"main": LAYER}, (PARAMS, X), leaves,
            {"bind": ["params"], "weights": "own_file.safetensors"}, (0, 1),
        ),
        "external": Golden(
            lambda x: x @ jnp.sin(noise), {"main": [[few[:, :64]], [few[:, 64:128]]]}, (few[:, :64],),
            options={"weights": "external.safetensors"},
        ),
        "compressed": Golden(permuted, {"main": [[few[:, :200]], [few[:, 64:264]]]}, (few[:, :200],)),
        "state": Golden(
            decode, {"main": [[r] for r in rows]}, (cache, rows[0]), options={"state": ["cache"]},
            reference={"main": lambda: decoded(*rows)},
        ),
        "quantized": Golden(
            lambda x: x @ quantized, {"main": [[few], [few + 1]]}, (few,), {"main": lambda x: [x @ quantized]},
            {"quantize_weights": "int8"},
        ),
    }  # fmt: skip


def of_programs() -> dict[str, Golden]:
    """Return the models with sizes, control flow, devices, dtypes and calls of their own."""
    z = (np.arange(12) % 5 - 2 + 1j * (np.arange(12) % 3)).reshape(3, 4).astype("c8")
    return {
        "devices": Golden(
            DEVICES, {"main": [[X, W]]}, (), {"main": lambda x, w: [(x + x) @ w]},
            {"devices": {"d0": V3, "d1": V3}},
        ),
        "loops": several(
            small_loop=(small_loop, [[np.int32(4), X], [np.int32(0), X]]),
            carried=(carried, [[X, np.float32(20)], [X, np.float32(1e9)]]),
        ),
        "conditionals": Golden(
            conditionals, {"main": [[np.array(f), np.int32(i), X] for f, i in ((True, 0), (False, 1), (True, 2))]},
            (np.array(True), np.int32(0), X),
        ),
        "symbolic": Golden(
            exported(ragged, "a, b", "c, b"), {"main": [[X, X[:1]], [W, W[:2] + 1]]}, reference={"main": xla(ragged)}
        ),
        "signed": Golden(
            exported(softmax_layer, "b, 8"), {"main": [[X[:1]], [X], [np.tile(X, (2, 1))]]},
            reference={"main": xla(softmax_layer)}, options={"specialize": {"b": (1, 3)}},
        ),
        "dtypes": several(low_precision=(low_precision, [low_arguments()]), spectrum=(spectrum, [[z], [z.conj()]])),
        "checked": Golden(
            CHECKED, {"main": [[X, np.int32(3)]]}, (), {"main": lambda x, i: [x * np.float32(i)]},
            {"debug_info": True, "memory_limit": 1 << 20},
        ),
        "calls": several(
            {"native": lambda x: [(x * 0.5).sum(1) + 1], "bound": lambda x: [np.bincount(x, minlength=4).astype("i4")]},
            native=(native_call, [[X]]), bound=(bound_call, [[np.array([1, 3, 1], "i4")]]),
        ),
        "collectives": Golden(
            COLLECTIVES, {"main": [[X[:, :4].repeat(2, 0)[:4]]]}, (), {"main": lambda x: [x + x, x, x]},
        ),
    }  # fmt: skip


def of_targets() -> dict[str, Golden]:
    """Return the models for other CPUs and for GPUs."""
    wide = (np.arange(128 * 128).reshape(128, 128) % 9).astype(ml_dtypes.bfloat16)
    gpu_calls = {"main": [[X, W], [X * 2, W - 1]]}
    return {
        "portable": Golden(
            softmax_layer, {"main": [[X]]}, (X,), options={"target": "cpu:x86-64-v2,cpu:x86-64-v3,cpu:aarch64"}
        ),
        "sve": Golden(softmax_layer, {"main": [[X]]}, (X,), options={"target": "cpu:aarch64-sve512"}),
        "amx": Golden(softmax_layer, {"main": [[X]]}, (X,), options={"target": "cpu:x86-64-amx"}),
        "ptx": Golden(gpu, gpu_calls, (X, W), options={"target": "cuda:compute_80", "debug_info": True}),
        "sm_80": Golden(gpu, gpu_calls, (X, W), options={"target": "cuda:sm_80", "debug_info": True}),
        "sm_90": several(
            gpu=(gpu, gpu_calls["main"]), tensor_cores=(tensor_cores, [[wide]]),
            options={"target": "cuda:sm_90", "debug_info": True},
        ),
        "mixed": Golden(
            DEVICES, {"main": [[X, W]]}, (), {"main": lambda x, w: [(x + x) @ w]},
            {"devices": {"d0": V3, "d1": "cuda:sm_90"}, "debug_info": True},
        ),
    }  # fmt: skip


def goldens() -> dict[str, Golden]:
    """Return all models by the names of their bundles."""
    return of_weights() | of_programs() | of_targets()
