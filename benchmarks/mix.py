"""One model on the CPU and GPUs together: python benchmarks/mix.py [--dim 1024 --layers 8 --tokens 64 --gpus 2].

Embedding and sampling are on the CPU, transformer blocks on a GPU, or on two as two stages. Printed: the transfers (the
fewest are to the GPU, from one GPU to the next, and back), their bytes, the largest difference of the logits
from those of the CPU alone, the chosen tokens that differ, and the median time of a call.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda.driver import device_count, missing

HEADS = 8


def weights_of(dim: int, layers: int, words: int) -> dict[str, Any]:
    """Return random weights."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    shapes = ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim))
    blocks = [tuple(normal(*shape) for shape in shapes) for _ in range(layers)]
    return {"embedding": normal(words, dim) * np.float32(np.sqrt(words)), "blocks": blocks, "head": normal(dim, words)}


def block(h: jax.Array, weights: tuple[Any, ...]) -> jax.Array:
    """Return the hidden states after a layer: attention and a network of two products."""
    qkv, out, up, down = map(jnp.asarray, weights)
    count, dim = h.shape
    q, k, v = jnp.split((normalised(h) @ qkv).reshape(count, 3 * HEADS, dim // HEADS).swapaxes(0, 1), 3)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(dim // HEADS)
    scores = jnp.where(jnp.tri(count, dtype=bool), scores, -jnp.inf)
    h = h + (jax.nn.softmax(scores) @ v).swapaxes(0, 1).reshape(count, dim) @ out
    return h + jax.nn.gelu(normalised(h) @ up) @ down


def normalised(h: jax.Array) -> jax.Array:
    """Return rows of mean 0 and variance 1."""
    h = h - h.mean(-1, keepdims=True)
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)


def model_of(weights: Mapping[str, Any], tokens: int, gpus: int) -> bytes:
    """Return the model, which names its devices: ``host``, and ``g0`` and ``g1``, each with its blocks."""
    blocks = weights["blocks"]
    stages = [blocks[len(blocks) * n // gpus : len(blocks) * (n + 1) // gpus] for n in range(gpus)]

    def model(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.asarray(weights["embedding"])[ids]
        for n, stage in enumerate(stages):
            h = moved(h, f"g{n}")
            for layer in stage:
                h = block(h, layer)
        logits = moved(h[-1:] @ jnp.asarray(weights["head"]), "host")
        return jnp.argmax(logits, -1).astype(jnp.int32), logits

    with jax.default_device(jax.devices("cpu")[0]):
        lowered = jax.jit(model).lower(jax.ShapeDtypeStruct((tokens,), jnp.int32))
    return with_devices(lowered.compiler_ir("stablehlo"))


def moved(x: jax.Array, device: str) -> jax.Array:
    """Return ``x`` on another device; :func:`with_devices` writes its name where aotc reads it."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("aotc.transfer", result, legacy_backend_config=device, custom_call_api_version=1)
    return call(x)


def with_devices(module: Any) -> bytes:
    """Return a module as bytecode, its argument on ``host``, its transfers with their devices."""
    with module.context:
        for function in module.body.operations:
            function.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get({"aotc.affinity": text("host")})])
            for op in function.regions[0].blocks[0].operations:
                if op.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == "aotc.transfer":
                    op.attributes["aotc.to"] = op.attributes["backend_config"]
            break
        data = io.BytesIO()
        module.operation.write_bytecode(data)
    return data.getvalue()


def text(value: str) -> Any:
    """Return a string as an attribute."""
    return ir.StringAttr.get(value)


def median_seconds(call: Callable[[], object], calls: int) -> float:
    """Return the median time of a call, after some to warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def compiled(model: bytes, devices: Mapping[str, str]) -> bytes:
    """Compile the model, and print what is moved."""
    data = aotc.compile(model, devices=devices, source=False)
    (variant,) = open_bundle(data).manifest["variants"]
    rows = ", ".join(f"{t['from']} to {t['to']} {t['bytes']:,} B" for t in variant.get("transfers", ()))
    print(f"{variant['target']}: {len(data) / 1e6:.0f} MB, transfers: {rows}")
    return data


def report(name: str, module: Any, ids: np.ndarray, want: list[np.ndarray], calls: int) -> None:
    """Print what a loaded model computes, and how long it takes."""
    token, logits = map(np.asarray, module.invoke("main", ids, results="numpy"))
    error = np.abs(logits - want[1]).max() / np.abs(want[1]).max()
    seconds = median_seconds(lambda: module.invoke("main", ids, results="numpy"), calls)
    wrong = int((token != want[0]).sum())
    print(f"{name}: {1e3 * seconds:.3f} ms a call, error {error:.1e}, {wrong} tokens differ, on {module.devices}")


def main() -> None:
    """Compile and run the model on the CPU alone, with one GPU, and with two."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"dim": 1024, "layers": 8, "tokens": 64, "words": 32000, "gpus": 2, "calls": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if missing():
        parser.exit(1, f"{missing()}\n")
    weights = weights_of(options.dim, options.layers, options.words)
    ids = np.random.default_rng(1).integers(0, options.words, options.tokens).astype(np.int32)
    for gpus in range(1, min(options.gpus, device_count()) + 1):
        model = model_of(weights, options.tokens, gpus)
        names = ["host", *(f"g{n}" for n in range(gpus))]
        alone = aotc.load(compiled(model, dict.fromkeys(names, "cpu")))
        want = alone.invoke("main", ids, results="numpy")
        report("CPU alone", alone, ids, want, options.calls)
        mix = compiled(model, {name: "cpu" if name == "host" else "cuda:sm_90" for name in names})
        report(f"CPU and {gpus} GPUs", aotc.load(mix), ids, want, options.calls)
        if gpus > 1:
            one = {name: "cpu:0" if name == "host" else "cuda:0" for name in names}
            report("the stages on one GPU", aotc.load(mix, devices=one), ids, want, options.calls)


if __name__ == "__main__":
    main()
