"""What is told of a sharded model: layouts, the mesh, collectives with bytes, axes and times; and its bound weights."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.rank_cases import run_threads

import aotc
from aotc.tools.explain.collectives import mesh_axes_of_groups
from aotc.tools.simulate.links import LINKS, sent_by_ring
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.ranks import collectives
from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.layout import Mesh
from aotc.vmfb.ranks.threads import thread_links

MESH = {"data": 2, "model": 4}
PARAMS = {"v": np.linspace(-1, 1, 128 * 64, dtype="f4").reshape(128, 64)[::-1].copy(),
          "w": np.linspace(-1, 1, 64 * 128, dtype="f4").reshape(64, 128)}  # fmt: skip
X = np.linspace(0, 1, 8 * 64, dtype="f4").reshape(8, 64)
LAYOUTS = {"v": P("model", None), "w": P(None, "model")}, P("data", None)


def layers(params, x):
    def step(h, _):
        with jax.named_scope("mlp"):
            return jnp.tanh(h @ params["w"]) @ params["v"] / 64, None

    h, _ = jax.lax.scan(step, x, None, length=5)
    return h + jnp.sum(h, 0)


def compiled(mesh=MESH, **flags):
    return aotc.compile(layers, PARAMS, X, mesh=mesh, in_shardings=LAYOUTS, out_shardings=LAYOUTS[1], **flags)


@pytest.fixture(scope="module")
def sharded():
    return compiled()


def test_a_signature_shows_the_whole_array_and_its_sharding(sharded):
    (link, *others) = thread_links(8)
    module = aotc.load(sharded, ranks=link)
    text = "x: f32[4, 64] of f32[8, 64] cut by data, -"
    assert text in str(module.signature)
    assert "(result: f32[4, 64] of f32[8, 64] cut by data, -)" in str(module.signature)
    spec = module.inputs[2]
    assert str(spec) == text
    assert (spec.whole, spec.layout) == ((8, 64), (("data",), ()))
    assert all(link.rank for link in others)


def test_a_bundle_of_one_device_has_no_sharding():
    spec = aotc.inspect(aotc.compile(jnp.tanh, X)).functions["main"].inputs[0]
    assert spec[1:] == ("f32", (8, 64), "", (), ())


def test_inspect_has_the_mesh_and_counts_collectives(sharded):
    found = aotc.inspect(sharded)
    assert found.mesh == "data=2 x model=4"
    assert [tuple(getattr(c, k) for k in ("op", "count", "sent")) for c in found.variants[0].collectives] == [
        ("all_reduce", 2, 5 * 2 * 4 * 64 * 4 * 3 // 4 + 2 * 64 * 4 // 2)
    ]
    text = str(found)
    assert "2 all_reduce (a rank sends 7.9 kB)" in text
    assert "data=2 x model=4" in text
    assert "_all_reduce" in text
    assert "custom_call" not in text
    assert "Python functions" not in text


def test_inspect_counts_collectives_without_debug_information():
    found = aotc.inspect(compiled(debug_info=False)).variants[0].collectives
    assert [(c.op, c.count, c.sent) for c in found] == [("all_reduce", 2, None)]


def test_explain_collectives_has_ops_axes_lines_layers_and_iterations(sharded):
    report = aotc.explain("collectives", sharded, link="ib")
    first, second = report.rows
    assert (first.op, first.types) == ("all_reduce", ("f32[4, 64]",))
    assert (first.axes, first.group, first.runs) == ("model", 4, 5)
    assert (second.types, second.axes, second.runs, second.within) == (("f32[64]",), "data", 1, "")
    assert first.scope == "mlp"
    assert "test_explain_collectives.py:" in first.line
    assert first.seconds == pytest.approx(6 * 14e-6 + first.sent / 50e9)
    assert [(s.axes, s.runs) for s in report.sums] == [("model", 5), ("data", 1)]
    assert report.sent == 7936
    assert "all_reduce" in report._repr_html_()
    assert "14 us a step, 50 GB/s" in " ".join(str(report).split())


def test_a_model_of_one_device_has_no_collectives():
    assert "no collectives" in str(aotc.explain("collectives", jnp.tanh, X))


def test_an_unknown_link_is_refused(sharded):
    with pytest.raises(aotc.CallError, match="no such link"):
        aotc.explain("collectives", sharded, link="rope")


def test_explain_collectives_command_prints_the_report(sharded, tmp_path):
    path = tmp_path / "model.vmfb"
    path.write_bytes(sharded)
    run = [sys.executable, "-m", "aotc", "explain", "collectives", str(path), "--link=loopback", "--json"]
    found = json.loads(subprocess.run(run, capture_output=True, check=True, text=True).stdout)
    assert [row["axes"] for row in found["rows"]] == ["model", "data"]
    assert found["link"]["name"] == "loopback"


def test_a_picture_of_collectives_is_refused(tmp_path):
    run = [sys.executable, "-m", "aotc", "explain", "collectives", "x.vmfb", f"--picture={tmp_path / 'x.svg'}"]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.returncode == 2
    assert "no picture of collectives" in found.stderr


def test_diff_shows_another_mesh_and_another_layout(sharded):
    names = {row.name for row in aotc.diff(sharded, compiled({"data": 4, "model": 2})).facts}
    assert {"mesh", "function"} <= names
    other = aotc.compile(layers, PARAMS, X, mesh=MESH, in_shardings=(LAYOUTS[0], P()), out_shardings=P())
    rows = {row.name: (row.first, row.second) for row in aotc.diff(sharded, other).facts}
    assert rows["layout of x"] == ("data, -", "")
    assert "mesh" not in rows


def test_the_report_page_has_the_mesh(sharded):
    from aotc.tools.page.facts import facts_of

    assert facts_of(bytes(sharded), "x")["mesh"] == "mesh data=2 x model=4"


class Counted:
    """A link that counts the bytes that it sends."""

    def __init__(self, link):
        self.link, self.rank, self.size, self.sent = link, link.rank, link.size, 0

    def exchange(self, sends, receives, what):
        self.sent += sum(x.nbytes for x in sends.values())
        self.link.exchange(sends, receives, what)


SHAPES = {"all_gather": lambda n: ((64, 4), (64 * n, 4)), "reduce_scatter": lambda n: ((64 * n, 4), (64, 4)),
          "all_to_all": lambda n: ((64 * n, 4), (64 * n, 4))}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("op", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"])
def test_modelled_bytes_equal_the_bytes_that_a_transport_sends(op, ranks, monkeypatch):
    monkeypatch.setattr(collectives, "GATHER_BYTES", 0)
    operand, result = SHAPES.get(op, lambda n: ((64 * n, 4), (64 * n, 4)))(ranks)
    facts = {"reduction": "add"} if "reduce" in op else {}
    pairs = tuple((n, (n + 1) % ranks) for n in range(ranks)) if op == "collective_permute" else ()
    groups = () if pairs else (tuple(range(ranks)),)
    collective = Collective(op, 0, groups=groups, pairs=pairs, **facts)

    def send(link):
        counted = Counted(link)
        run_collective(collective, counted, [np.ones(operand, "f4")], [np.empty(result, "f4")])
        return counted.sent

    expected, _ = sent_by_ring(op, 16 * operand[0], ranks)
    assert run_threads(thread_links(ranks), send) == [expected] * ranks


def test_mesh_axes_are_derived_from_groups():
    mesh = Mesh((("data", 2), ("model", 4)))
    assert mesh_axes_of_groups(mesh, [[0, 1, 2, 3], [4, 5, 6, 7]]) == "model"
    assert mesh_axes_of_groups(mesh, [[0, 4], [1, 5], [2, 6], [3, 7]]) == "data"
    assert mesh_axes_of_groups(mesh, [list(range(8))]) == mesh_axes_of_groups(mesh, []) == "data+model"
    assert mesh_axes_of_groups(mesh, [[0, 1], [2, 3], [4, 5], [6, 7]]) == "model in groups of 2"
    assert mesh_axes_of_groups(mesh, [], [[0, 1], [1, 0]]) == "model"
    assert mesh_axes_of_groups(Mesh((("data", 2), ("model", 2)), (0, 2, 1, 3)), [[0, 2], [1, 3]]) == "model"


def test_each_modelled_link_has_a_source():
    assert all(link.source and link.latency > 0 and link.bandwidth > 0 for link in LINKS.values())


@pytest.mark.parametrize("layouts", [LAYOUTS[0], {"v": P(None, "data"), "w": P("data", None)}], ids=["tp", "fsdp"])
def test_bound_weights_of_a_rank_are_its_shards(layouts):
    shardings = layouts, P("data", None)
    data = aotc.compile(
        layers, PARAMS, X, mesh=MESH, in_shardings=shardings, out_shardings=shardings[1], bind=["params"]
    )

    def call(link):
        module = aotc.load(data, ranks=link)
        params, x = module.shard(PARAMS, X)
        return module.gather(module.bind({"params": params})(x))

    assert open_bundle(data).manifest["functions"]["main"]["arguments"][0]["whole"] == [128, 64]
    for found in run_threads(thread_links(8), call):
        np.testing.assert_allclose(found, jax.jit(layers)(PARAMS, X), rtol=1e-4, atol=1e-4)


def test_gpu_bundles_have_the_collectives_of_cpu_bundles():
    rows, others = (aotc.explain("collectives", compiled(target=target)).rows for target in ("cpu", "cuda:sm_90a"))
    assert [(r.op, r.bytes, r.axes, r.loc) for r in others] == [(r.op, r.bytes, r.axes, r.loc) for r in rows]
    assert rows


def test_devices_of_several_kinds_are_refused():
    with pytest.raises(aotc.CompileError, match=r"(?s)several ranks.*of several kinds.*without devices="):
        compiled(devices={"d0": "cpu", "d1": "cuda:sm_90a"})
