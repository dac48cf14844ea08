"""``aotc explain fusion``: each kernel, what it takes, and why each neighbour was taken or refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.differential import normal
from typer.testing import CliRunner

import aotc
from aotc.tools.explain.fusion import explain_fusion
from aotc_cli.main import app

pytestmark = pytest.mark.ir

INPUTS = Path(__file__).parents[1] / "inputs"
NEEDED = "1,048,576 bytes of a row > 262,144 bytes of scratch memory, and without them"


def mirrored(x):
    y = jnp.tanh(x) + 1
    return y * jnp.flip(y)


def test_rows_that_do_not_fit_are_explained():
    report = explain_fusion(INPUTS / "softmax_mul.mlir", target="cpu:x86-64-v4")
    row, loop = report.regions
    assert report.target == "cpu:x86-64-v4"
    assert (row.kind, row.ops) == ("row", ("reduce", "sub", "exp", "reduce", "div"))
    assert loop.ops == ("mul", "mul", "tanh")
    assert (row.bytes_in, row.bytes_out) == (str(32 * 262144 * 4), str(32 * 262144 * 4 + 32 * 4))
    assert not row.memory
    (refused,) = [n for n in row.neighbours if not n.taken]
    assert refused.ops == ("mul",)
    assert refused.reason.startswith(NEEDED)
    assert refused.lines[0].endswith("softmax_mul.mlir:10:8")


def test_split_rows_are_explained():
    report = explain_fusion(INPUTS / "softmax_mul.mlir", target="cuda:sm_90a", shared_memory_limit=48 << 10)
    (row,) = report.rows
    assert row.taken
    assert row.reason.startswith("1,048,576 bytes of a row > 131,072 bytes of registers, and 32 rows")
    assert "read in parts of 4,096; exp again takes" in row.reason
    assert row.lines[0].endswith("softmax_mul.mlir:4:24")
    assert [r.ops for r in report.regions][-1] == ("sub", "exp", "div", "mul", "tanh")
    for region in report.regions:
        assert region.threads in (128, 256, 512, 1024)
        assert 0 < region.registers < 64
        assert 0 < region.occupancy <= 100
        assert all(used <= limit for used, limit in region.memory.values())
    assert 0 < report.regions[0].memory["a thread's memory"][0] < 1024


def test_refused_recomputation_is_explained():
    report = explain_fusion(mirrored, normal(64))
    assert [r.ops for r in report.regions] == [("tanh", "add"), ("mul",)]
    refused = [n for r in report.regions for n in r.neighbours if not n.taken]
    assert [n.reason for n in refused] == [
        "it reads at another place than the region's loops are",
        "1728 scalar operations, 193 % of 896 in separate kernels > 125 %",
    ]
    assert all("test_explain_fusion.py" in line for r in report.regions for line in r.lines)


def test_fused_neighbours_have_their_reasons():
    (region,) = explain_fusion(lambda x: (jnp.tanh(x) + 1)[:, :4] * 2, normal(8, 8)).regions
    assert region.ops == ("tanh", "add", "mul")
    assert [(n.ops, n.reason) for n in region.neighbours if n.taken] == [
        (("add",), "computed in the loop of its operand"),
        (("tanh", "add"), "only this region reads it"),
    ]


def test_symbolic_sizes_are_explained_as_expressions():
    (spec,) = jax.export.symbolic_args_specs((normal(4),), ("n",))
    (region,) = explain_fusion(jax.export.export(jax.jit(jnp.sin))(spec)).regions
    assert (region.bytes_in, region.bytes_out) == ("4*n", "4*n")


def test_explain_fusion_of_a_bundle_equals_that_of_its_model(tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile(jax.jit(mirrored), normal(64), opt_level=1))
    own, again = explain_fusion(path), explain_fusion(path, opt_level=3)
    assert own == explain_fusion(path.read_bytes())
    assert [r.ops for r in own.regions] == [r.ops for r in explain_fusion(mirrored, normal(64), opt_level=1).regions]
    assert len(again.regions) <= len(own.regions)


def test_explain_fusion_command_prints_regions():
    model = str(INPUTS / "softmax_mul.mlir")
    shown = CliRunner().invoke(app, ["explain", "fusion", model, "--target=cuda:sm_90a"])
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert "rows of softmax_mul.mlir:4:24 and 1 more, read once, in parts: 1,048,576 bytes of a row >" in text
    assert shown.output.endswith("\n3 regions for cuda:sm_90a; equal regions share a kernel\n")
    shown = CliRunner().invoke(app, ["explain", "fusion", model, "--target=cpu:x86-64-v4"])
    assert f"refused mul (softmax_mul.mlir:10:8): {NEEDED}" in " ".join(shown.output.split())
    shown = CliRunner().invoke(app, ["explain", "fusion", model, "--shared-memory-limit=9", "--json"])
    facts = json.loads(shown.output)
    assert [r["kind"] for r in facts["regions"]] == ["row", "loop"]
    assert CliRunner().invoke(app, ["explain", "fusion", model, "--picture=p.svg"]).exit_code == 2
