"""Partition of a transformer for several devices.

Each round is a fresh process that lowers 32 layers of width 4096 over a mesh, 8 devices for each copy of the model,
and partitions the program. ``partition`` is the wall time of the partitioning, most of it that of XLA's partitioner in
its child process; ``memory`` is the child's peak. ``ops`` counts the ops of one rank's program, ``collectives`` the
collectives among them.
"""

from __future__ import annotations

import re
import statistics
import sys

from benchmarks import children, options, report, timing

TIMED = """
import resource, sys, time
import jax, jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P
from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir
from aotc.frontend.contexts import make_context
from aotc.frontend.hidden_ops import operations_of
from aotc.frontend.partition.partition import partitioned

devices, layers, d, heads, wide = (int(x) for x in sys.argv[1:])
mesh = AbstractMesh((devices // 8, 8), ("data", "model"))

def spec(shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*axes)))

def layer(w, x):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = (jnp.einsum("btd,dhk->bhtk", h, w[name]) for name in "qkv")
    mixed = jax.nn.softmax(jnp.einsum("bhqk,bhtk->bhqt", q, k), -1)
    x = x + jnp.einsum("bhqt,bhtk,hkd->bqd", mixed, v, w["o"])
    return x + jax.nn.silu(x @ w["up"]) @ w["down"]

def model(weights, x):
    for w in weights:
        x = layer(w, x)
    return x

each = {name: spec((d, heads, d // heads), None, "model") for name in "qkv"} | {
    "o": spec((heads, d // heads, d), "model"), "up": spec((d, wide), None, "model"), "down": spec((wide, d), "model"),
}
lowered = jax.jit(model).trace([each] * layers, spec((devices // 8, 128, d), "data")).lower(lowering_platforms=("cpu",))
code = jax_mlir.module_to_bytecode(lowered._lowering.stablehlo())
begin = time.perf_counter()
with make_context():
    data, _ = partitioned(ir.Module.parse(code))
    took = time.perf_counter() - begin
    names = [op.name.partition(".")[2] for op in operations_of(ir.Module.parse(data))]
exchanges = sum(name.startswith(("all_", "reduce_scatter", "collective_")) for name in names)
print("FIGURES", took, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, len(names), exchanges)
"""
SIZES = ("32", "4096", "32", "11008")
SMALL = ("2", "64", "8", "128")


def run(only: options.Only = "", rounds: options.Rounds = 5) -> None:
    """Print a row for each number of devices."""
    columns = (report.Column("partition s", width=11), report.Column("memory MiB", width=10))
    table = report.Table("devices", *columns, report.Column("ops"), report.Column("collectives", width=11))
    for devices in options.select(("8", "64", "512"), only):
        rows = []
        for _ in range(1 if timing.SMOKE else rounds):
            sizes = SMALL if timing.SMOKE else SIZES
            printed = children.output([sys.executable, "-c", TIMED, devices, *sizes], JAX_PLATFORMS="cpu")
            rows.append([float(x) for x in re.search(r"FIGURES (.*)", printed)[1].split()])  # type: ignore[index]
        table.add(devices, *(statistics.median(column) for column in zip(*rows)))
