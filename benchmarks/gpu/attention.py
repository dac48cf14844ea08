"""Attention next to torch's backends and jax.jit.

All engines run in one process on the same sizes: the time of a call on arrays in GPU memory, back to back. aotc and
torch replay graphs. Percentages are relative to the best of torch's backends; for few queries the rate is GB/s of
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import aotc
from benchmarks import options, report
from benchmarks.gpu.graphs import bundles_of, graph_of, need_gpu, time_jax_jit
from benchmarks.peers.torch_gpu import installed, time_torch_graph, to_torch

TARGET = "cuda:sm_90a"
JAX_FLOPS = 4 * 128 * 4096 * 4096 * 128  # XLA keeps scores in memory: of 128 heads of 8192 rows they fill the GPU
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32}


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v)


def causal(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def biased(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, bias=bias)


def cached(q: Any, k: Any, v: Any, length: Any) -> Any:
    """Attend with one query of each head to the first ``length`` keys of a cache."""
    return jax.nn.dot_product_attention(q, k, v, mask=(jnp.arange(k.shape[1]) < length)[None, None, None])


def _cases() -> Iterator[tuple[Any, ...]]:
    """Yield name, function, dtype, and the shapes of queries and of keys: batch, rows, heads, depth."""
    for size, name in ((1024, "1k"), (4096, "4k"), (8192, "8k")):
        for depth in (64, 128):
            for function in (attention, causal):
                shape = (8, size, 16, depth)
                yield f"8x16 {name} d{depth} {function.__name__}", function, "bf16", shape, shape
    yield "8x32/8 2k d128 groups causal", causal, "bf16", (8, 2048, 32, 128), (8, 2048, 8, 128)
    yield "8x12 1k d64 f16", attention, "f16", (8, 1024, 12, 64), (8, 1024, 12, 64)
    yield "8x16 1000 d80 causal", causal, "bf16", (8, 1000, 16, 80), (8, 1000, 16, 80)
    yield "4x8 2k d256 causal", causal, "bf16", (4, 2048, 8, 256), (4, 2048, 8, 256)
    yield "8x12 1k d64 bias", biased, "bf16", (8, 1024, 12, 64), (8, 1024, 12, 64)
    for batch, heads, keys, size in ((1, 32, 8, 4096), (1, 32, 8, 32768), (8, 32, 8, 8192), (1, 16, 16, 32768)):
        shapes = (batch, 1, heads, 128), (batch, size, keys, 128)
        yield f"{batch}x{heads}/{keys} decode {size}", attention, "bf16", *shapes
    yield "8x32/8 decode 8192 masked", cached, "bf16", (8, 1, 32, 128), (8, 8192, 8, 128)
    yield "8x16 decode 4096 d64", attention, "bf16", (8, 1, 16, 64), (8, 4096, 16, 64)
    yield "8x16 decode 8192 d64 f32", attention, "f32", (8, 1, 16, 64), (8, 8192, 16, 64)
    yield "1x12 decode 1024 d64 f32", cached, "f32", (1, 1, 12, 64), (1, 1024, 12, 64)
    for name, batch, size, heads, depth in (
        ("ViT", 8, 197, 6, 64), ("BERT", 8, 128, 12, 64), ("1k", 8, 1024, 12, 64), ("4k", 1, 4096, 12, 64),
        ("1k d128", 8, 1024, 12, 128),
    ):  # fmt: skip
        yield f"{name} f32", attention, "f32", (batch, size, heads, depth), (batch, size, heads, depth)
    yield "8x12 1k d64 f32 causal", causal, "f32", (8, 1024, 12, 64), (8, 1024, 12, 64)


CASES: dict[str, Any] = {name: rest for name, *rest in _cases()}


def arguments_of(function: Callable[..., Any], kind: str, queries: Any, keys: Any) -> list[Any]:
    """Return random arguments, the same for all engines."""
    random = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(KINDS[kind])
    made = [np.resize(np.roll(random, 7 * n), shape) for n, shape in enumerate((queries, keys, keys))]
    if function is biased:
        made.append(np.resize(random, (1, queries[2], queries[1], keys[1])))
    return [*made, np.int32(keys[1] - 5)] if function is cached else made


def torch_seconds_by_backend(function: Callable[..., Any], arguments: list[Any]) -> dict[str, float]:
    """Return the seconds of a replay of torch's graph for each of its backends."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.backends.cuda.matmul.allow_tf32 = True
    q, k, v = (to_torch(a).transpose(1, 2) for a in arguments[:3])
    more = {"is_causal": function is causal, "enable_gqa": q.shape[1] != k.shape[1]}
    if function is biased:
        more["attn_mask"] = to_torch(arguments[3])
    if function is cached:
        more["attn_mask"] = (torch.arange(k.shape[2], device="cuda") < int(arguments[3]))[None, None, None]
    found = {}
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                run = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, **more)
                found[name.split("_")[0].lower()] = time_torch_graph(run)
        except RuntimeError:  # a backend that does not take it
            continue
    return found


def attention_rows_in_f64(
    function: Callable[..., Any], arguments: list[Any]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Compute attention in f64 for some rows; return them with the numbers of the rows and heads."""
    q, k, v = (a[0].astype("f8").transpose(1, 0, 2) for a in (x[:1] for x in arguments[:3]))
    each = q.shape[0] // k.shape[0]
    heads = sorted({0, q.shape[0] - 1})
    rows = sorted({*range(0, q.shape[1], max(q.shape[1] // 16, 1)), q.shape[1] - 1})
    found = []
    for h in heads:
        scores = q[h][rows] @ k[h // each].T / np.sqrt(q.shape[-1])
        if function is biased:
            scores += arguments[3][0, h][rows].astype("f8")
        terms = np.arange(k.shape[1])
        if function is causal:
            scores[terms[None] > np.array(rows)[:, None]] = -np.inf
        if function is cached:
            scores[:, terms >= int(arguments[3])] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(weights / weights.sum(-1, keepdims=True) @ v[h // each])
    return np.stack(found), rows, heads


def flops_and_bytes(function: Callable[..., Any], kind: str, queries: Any, keys: Any) -> tuple[float, int]:
    """Return the floating-point operations of a case, and the bytes that it reads."""
    batch, rows, heads, depth = queries
    flops = 4 * batch * heads * rows * keys[1] * depth
    return flops / 2 if function is causal else flops, 2 * np.dtype(KINDS[kind]).itemsize * int(np.prod(keys))


def compile_case(name: str) -> bytes:
    """Compile the case ``name`` to a bundle."""
    function, *given = CASES[name]
    shapes = [jax.ShapeDtypeStruct(np.shape(a), a.dtype) for a in arguments_of(function, *given)]
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))  # CPUs have no f16 of this form
    return aotc.compile(lowered, target=TARGET, source=False)


def measure(name: str, data: bytes, table: report.Table, torch: bool) -> None:
    """Add the row of a case."""
    function, kind, queries, keys = CASES[name]
    arguments = arguments_of(function, kind, queries, keys)
    call = graph_of(data, arguments)
    ours = call.seconds()
    want, rows, heads = attention_rows_in_f64(function, arguments)
    got = np.asarray(call.result)[0][rows][:, heads].astype("f8").transpose(1, 0, 2)
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    backends = torch_seconds_by_backend(function, arguments) if torch else {}
    flops, bytes_ = flops_and_bytes(function, kind, queries, keys)
    theirs = time_jax_jit(function, arguments)[0] if flops <= JAX_FLOPS else None
    best = min(backends.values(), default=None)
    rate = {"GB/s": bytes_ / ours * 1e-9} if queries[1] == 1 else {"TFLOP/s": flops / ours * 1e-12}
    cells = [rate.get("TFLOP/s"), rate.get("GB/s"), theirs, best, 100 * best / ours if best else None, error]
    table.add(name, ours, *cells, min(backends, key=backends.__getitem__, default=""))


def run(only: options.Only = "", compile_: options.CompileTo = None, bundles: options.Bundles = None) -> None:
    """Print a row for each case."""
    data = bundles_of(options.select(CASES, only), compile_case, compile_, bundles)
    if compile_:
        return
    need_gpu()
    torch = installed()
    columns = [report.us("aotc"), "TFLOP/s", "GB/s", report.us("jax"), report.us("torch"), "percent", "error"]
    table = report.Table("attention", *columns, "backend")
    for name, bundle in data.items():
        try:
            measure(name, bundle, table, torch)
        except Exception as error:  # the others are still worth measuring
            table.failed(name, error)
