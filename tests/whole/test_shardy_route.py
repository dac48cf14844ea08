"""Programs that Shardy's own passes partition, next to those that XLA partitions for aotc: results and layouts.

Shardy's passes refuse or get wrong some of the programs of ``sharded_models`` in jaxlib 0.10.2 (decision 316); these
are of those that they partition.
"""

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.sharded_models import CASES, check, run_on_threads
from whole.shardy_route import partitioned

import aotc
from aotc.frontend.mlir import RawModel, fetch

pytestmark = pytest.mark.cpu

PROGRAMS = (
    "mlp", "mlp_bf16", "every_collective", "sums_over_axes", "ring", "pipeline", "manual_and_automatic", "reshaped",
    "branch", "scattered",
)  # fmt: skip


def sharded_text(case):
    """Return the StableHLO text of a case, with shardings."""
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))

    def named(specs):
        return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))

    given = {"in_shardings": case.ins, "out_shardings": case.outs}
    function = jax.jit(case.function, **{key: named(value) for key, value in given.items() if value is not None})
    return function.trace(*case.args).lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_shardy_and_xla_partitions_give_the_same_results(name):
    case = CASES[name]
    text = sharded_text(case)
    code, ranks = partitioned(text)
    arguments = jax.tree.leaves(case.args)
    check(case, run_on_threads(aotc.compile(RawModel(code, metadata={"ranks": ranks}), source=False), arguments))
    check(case, run_on_threads(aotc.compile(text, source=False), arguments))


@pytest.mark.parametrize("name", ["mlp", "reshaped"])
def test_shardy_and_xla_partitions_have_the_same_layouts(name):
    """Layouts that a program states are those of its ranks."""
    text = sharded_text(CASES[name])
    _, theirs = partitioned(text)
    ours = fetch(text).metadata["ranks"]
    assert ours["mesh"] == theirs["mesh"]
    for side in ("arguments", "results"):
        assert [[list(axes) for axes in row] for row in ours[side]] == theirs[side]
