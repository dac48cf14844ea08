"""One model on the CPU and GPUs together.

Transformer blocks are on one GPU, or on two as two stages. The suite prints the transfers with their bytes (the
minimum is to the GPU, from one GPU to the next, and back), the largest difference of the logits from those of the CPU
alone, the number of different tokens, and the time of a call.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jaxlib.mlir import ir

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.devices.cuda.driver import device_count
from benchmarks import options, report, timing
from benchmarks.gpu.graphs import need_gpu

HEADS = 8


def weights_of(dim: int, layers: int, words: int) -> dict[str, Any]:
    """Return random weights for a vocabulary of ``words``."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    shapes = ((dim, 3 * dim), (dim, dim), (dim, 4 * dim), (4 * dim, dim))
    blocks = [tuple(normal(*shape) for shape in shapes) for _ in range(layers)]
    return {"embedding": normal(words, dim) * np.float32(np.sqrt(words)), "blocks": blocks, "head": normal(dim, words)}


def block(h: jax.Array, weights: tuple[Any, ...]) -> jax.Array:
    """Return the hidden states after a layer: attention and a network of two matmuls."""
    qkv, out, up, down = map(jnp.asarray, weights)
    count, dim = h.shape
    q, k, v = jnp.split((normalised(h) @ qkv).reshape(count, 3 * HEADS, dim // HEADS).swapaxes(0, 1), 3)
    scores = q @ k.swapaxes(1, 2) / np.sqrt(dim // HEADS)
    scores = jnp.where(jnp.tri(count, dtype=bool), scores, -jnp.inf)
    h = h + (jax.nn.softmax(scores) @ v).swapaxes(0, 1).reshape(count, dim) @ out
    return h + jax.nn.gelu(normalised(h) @ up) @ down


def normalised(h: jax.Array) -> jax.Array:
    """Normalize rows to mean 0 and variance 1."""
    h = h - h.mean(-1, keepdims=True)
    return h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)


def model_of(weights: Mapping[str, Any], tokens: int, gpus: int) -> bytes:
    """Return a model that names its devices: ``host``, and ``g0`` and ``g1`` with their blocks."""
    blocks = weights["blocks"]
    stages = [blocks[len(blocks) * n // gpus : len(blocks) * (n + 1) // gpus] for n in range(gpus)]

    def model(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.asarray(weights["embedding"])[ids]
        for n, stage in enumerate(stages):
            h = transfer_to(h, f"g{n}")
            for layer in stage:
                h = block(h, layer)
        logits = transfer_to(h[-1:] @ jnp.asarray(weights["head"]), "host")
        return jnp.argmax(logits, -1).astype(jnp.int32), logits

    with jax.default_device(jax.devices("cpu")[0]):
        lowered = jax.jit(model).lower(jax.ShapeDtypeStruct((tokens,), jnp.int32))
    return with_devices(lowered.compiler_ir("stablehlo"))


def transfer_to(x: jax.Array, device: str) -> jax.Array:
    """Move ``x`` to another device; :func:`with_devices` adds the affinity that aotc reads."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = jax.ffi.ffi_call("aotc.transfer", result, legacy_backend_config=device, custom_call_api_version=1)
    return call(x)


def with_devices(module: Any) -> bytes:
    """Return a module as bytecode, with its argument on ``host`` and the devices of its transfers."""
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
    """Return a string attribute."""
    return ir.StringAttr.get(value)


def compile_mix(model: bytes, devices: Mapping[str, str]) -> bytes:
    """Compile the model, and print its transfers."""
    data = aotc.compile(model, devices=devices, source=False)
    (variant,) = open_bundle(data).manifest["variants"]
    rows = ", ".join(f"{t['from']} to {t['to']} {t['bytes']:,} B" for t in variant.get("transfers", ()))
    report.note(f"{variant['target']}: {len(data) / 1e6:.0f} MB, transfers: {rows}")
    return data


def run(
    dim: Annotated[int, typer.Option(help="Elements of a hidden state.")] = 1024,
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a call.")] = 64,
    words: Annotated[int, typer.Option(help="Words of the vocabulary.")] = 32000,
    gpus: Annotated[int, typer.Option(help="GPUs at most.")] = 2,
    rounds: options.Rounds = 30,
) -> None:
    """Compile and run the model on the CPU alone, with one GPU, and with more."""
    need_gpu()
    dim, layers, words = (64, 2, 100) if timing.SMOKE else (dim, layers, words)
    weights = weights_of(dim, layers, words)
    ids = np.random.default_rng(1).integers(0, words, tokens).astype(np.int32)
    table = report.Table("devices", report.ms("call"), "error", "tokens off")

    def measure(name: str, module: Any, want: list[Any]) -> None:
        token, logits = map(np.asarray, module.invoke("main", ids, results="numpy"))
        error = float(np.abs(logits - want[1]).max() / np.abs(want[1]).max())
        times = timing.interleaved({"call": lambda: module.invoke("main", ids, results="numpy")}, rounds=rounds)
        table.add(f"{name}: {module.devices}", times.median("call"), error, int((token != want[0]).sum()))

    for count in range(1, min(gpus, device_count()) + 1):
        model = model_of(weights, tokens, count)
        names = ["host", *(f"g{n}" for n in range(count))]
        alone = aotc.load(compile_mix(model, dict.fromkeys(names, "cpu")))
        want = alone.invoke("main", ids, results="numpy")
        measure("CPU alone", alone, want)
        mixed = compile_mix(model, {name: "cpu" if name == "host" else "cuda:sm_90" for name in names})
        measure(f"CPU and {count} GPUs", aotc.load(mixed), want)
        if count > 1:
            one = {name: "cpu:0" if name == "host" else "cuda:0" for name in names}
            measure("the stages on one GPU", aotc.load(mixed, devices=one), want)
