"""Pages and comparisons of bundles: what they say is what `aotc explain` says; the page stands alone."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.tools.explain.fusion import explain_fusion
from aotc.tools.explain.schedule import explain_schedule
from aotc.tools.page.build import LIBRARY, page_of
from aotc.tools.page.compare import compare_kernels
from aotc.tools.page.facts import facts_of
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.profile.stored_records import bundle_with_profile
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
X = np.linspace(-1, 1, 32 * 32, dtype=np.float32).reshape(32, 32)
DATA = re.compile(r'<script type="application/json" id="facts">(.*?)</script>', re.DOTALL)


def model(x):
    y = jnp.tanh(x @ x + 1)
    return jax.nn.softmax(y, 1), jnp.sort(y, 1)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    exported = jax.export.export(jax.jit(model))(X)
    (folder / "m.jaxexp").write_bytes(exported.serialize())
    (folder / "m.vmfb").write_bytes(aotc.compile(exported))
    (folder / "o0.vmfb").write_bytes(aotc.compile(exported, opt_level=0))
    (folder / "bare.vmfb").write_bytes(aotc.compile(exported, debug_info=False))
    (folder / "sourceless.vmfb").write_bytes(aotc.compile(exported, source=False))
    return folder


def invoke(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


def test_report_facts_equal_those_of_explain(files):
    data = (files / "m.vmfb").read_bytes()
    facts = facts_of(data, "m.vmfb")
    schedule = explain_schedule(open_bundle(data))
    assert [s["kernel"] for s in facts["steps"]] == [r.kernel for r in schedule.rows]
    assert [s["ns"] for s in facts["steps"]] == [r.ns for r in schedule.rows]
    assert (facts["work"], facts["path_ns"]) == (schedule.work, schedule.path)
    for region in explain_fusion(data).regions:
        kernel = facts["kernels"][region.name]
        assert (tuple(kernel["ops"]), tuple(kernel["lines"])) == (region.ops, region.lines)
        assert [n["reason"] for n in kernel["neighbours"]] == [n.reason for n in region.neighbours]
        assert kernel["text"].startswith(f"def {region.name}(")
        assert kernel["code_bytes"] > 0
    places = {place for _, place in facts["source"] if place}
    assert places & {line for k in facts["kernels"].values() for line in k["lines"]}
    assert any("stablehlo.tanh" in line and Path(__file__).name in place for line, place in facts["source"])
    assert not any("loc(" in line for line, _ in facts["source"] if "stablehlo." in line)
    assert sum(s["bytes"] for s in facts["segments"]) < facts["bytes"]


def test_layers_that_share_kernels_have_their_own_scopes():
    def layers(x):
        for n in range(3):
            with jax.named_scope(f"blocks/{n}"):
                x = jnp.sort(jnp.tanh(x @ X), 1)
        return x

    facts = facts_of(aotc.compile(layers, jax.ShapeDtypeStruct((32, 32), jnp.float32)), "m.vmfb")
    assert {s["scope"] for s in facts["steps"]} == {"blocks/0", "blocks/1", "blocks/2"}
    assert len(facts["kernels"]) < len(facts["steps"])
    assert any(s["place"].startswith("test_report_page.py:") for s in facts["steps"])


def test_a_report_of_a_symbolic_model_has_facts_for_several_sizes():
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 8"])
    data = aotc.compile(lambda x: jnp.tanh(x) @ x.T, jax.ShapeDtypeStruct((n, 8), jnp.float32))
    facts = facts_of(data, "m.vmfb")
    assert (facts["sizes"], facts["assumed"]) == ({"n": 16}, ["n"])
    assert [c["sizes"]["n"] for c in facts["choices"]] == [64, 256]  # the model refuses 1 and 4
    for choice in facts["choices"]:
        assert choice["work"] == explain_schedule(open_bundle(data), "main", choice["sizes"]).work
        assert choice["assumed"] == []
    fixed = facts_of(data, "m.vmfb", sizes={"n": 32})
    assert (fixed["sizes"], fixed["assumed"], fixed["choices"]) == ({"n": 32}, [], [])


def test_times_scaled_from_other_sizes_are_not_labelled_measured():
    (n,) = jax.export.symbolic_shape("n")
    data = aotc.compile(lambda x: jnp.sort(jnp.tanh(x) @ x.T), jax.ShapeDtypeStruct((n, 8), jnp.float32))
    record = aotc.load(data, threads=1).profile("main", np.ones((64, 8), np.float32), repeat=1)
    data = bundle_with_profile(open_bundle(data), record)
    for sizes, scaled in (({"n": 64}, False), ({}, True)):
        facts = facts_of(data, "m", sizes=sizes)
        assert {s["scaled"] for s in facts["steps"]} == {scaled}
        assert all(s["measured"] for s in facts["steps"])
        text = str(explain_schedule(open_bundle(data), "main", sizes))
        assert ("~: measured at other sizes, and scaled to these" in text) == scaled


def test_each_kernel_has_a_level_of_memory_and_its_rate(files):
    facts = facts_of((files / "m.vmfb").read_bytes(), "m.vmfb")
    levels = facts["roof"]["levels"]
    assert [level["name"] for level in levels] == ["L1 cache", "L2 cache", "L3 cache", "memory"]
    assert levels[0]["rate"] is None  # a load costs no more than the operation that uses it
    rates = [level["rate"] for level in levels[1:]]
    assert rates == sorted(rates, reverse=True)
    for step in facts["steps"]:
        assert step["bytes"] <= (levels[step["level"]]["size"] or step["bytes"])
        assert step["level"] == 0 or step["bytes"] > levels[step["level"] - 1]["size"]
    json.dumps(facts, allow_nan=False)


def test_the_live_bytes_curve_reaches_the_peak(files):
    """A result that overwrites its operand counts once, in the line as in the peak."""
    memory = facts_of((files / "m.vmfb").read_bytes(), "m.vmfb")["memory"]
    assert len(memory["alive"]) == memory["steps"]
    assert max(memory["alive"]) == memory["alive"][memory["at"]] == memory["peak"]
    x = jnp.zeros((64, 64))
    chain = facts_of(bytes(aotc.compile(lambda x: jnp.sin(jnp.sort(x @ x, 0)) @ x, x)), "m")["memory"]
    assert max(chain["alive"]) == chain["peak"] > 0


def test_a_kernel_shows_the_stablehlo_of_its_ops():
    def layers(x):
        for n in range(2):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.sort(jnp.tanh(x @ X), 1)
        return x

    facts = facts_of(bytes(aotc.compile(layers, X)), "m")
    text = {n: [facts["source"][m - 1][0] for m in k["text_lines"]] for n, k in facts["kernels"].items()}
    products = [[line for line in lines if "dot_general" in line] for lines in text.values()]
    assert all(len(found) <= 1 for found in products)  # both layers are made by one line
    assert sum(map(len, products)) >= 1
    assert all(lines for lines in text.values())
    assert {s["scope"] for s in facts["steps"] if not s["copy"]} == {"layer_0", "layer_1"}
    assert {s["place"] for s in facts["steps"] if not s["copy"]} <= {p.rpartition("/")[2] for _, p in facts["source"]}


def test_the_report_page_needs_no_other_file(files, tmp_path):
    done = invoke("report", files / "m.vmfb", "-o", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "r.html").read_text()
    own = page.replace(LIBRARY.read_text(), "")
    assert "src=" not in own
    assert not re.search(r"(href|url)[=(]\"?https?:", own)
    assert "default-src 'none'" in page
    assert "The Cytoscape Consortium" in page
    said = json.loads(DATA.search(page)[1])
    assert said["name"] == facts_of((files / "m.vmfb").read_bytes(), "m")["name"]


def test_data_in_the_page_is_escaped():
    facts = {"name": "</script><b>@@LIBRARY@@", "target": "<cpu>", "x": "</SCRIPT>\u2028"}
    page = page_of(facts)
    assert json.loads(DATA.search(page)[1]) == facts
    assert "<title>&lt;/script&gt;" in page


def test_report_compiles_models_and_omits_reasons_without_a_source(files, tmp_path):
    assert invoke("report", files / "m.jaxexp", "-o", tmp_path / "a.html").exit_code == 0
    assert invoke("report", files / "sourceless.vmfb", "-o", tmp_path / "b.html").exit_code == 0
    facts = json.loads(DATA.search((tmp_path / "b.html").read_text())[1])
    assert facts["source"] == []
    assert all(k["text"] and not k["neighbours"] for k in facts["kernels"].values())


def test_a_failed_report_does_not_overwrite_a_file(files, tmp_path):
    out = tmp_path / "r.html"
    out.write_text("mine")
    (tmp_path / "text.vmfb").write_text("no bundle")
    for words in (
        (files / "bare.vmfb", "-o", out), (tmp_path / "text.vmfb", "-o", out), (files / "none.vmfb", "-o", out),
        (files / "m.vmfb", "-o", out, "--function=other"), (files / "m.vmfb", "-o", tmp_path / "no" / "r.html"),
        (files / "m.vmfb", "-o", tmp_path),
    ):  # fmt: skip
        done = invoke("report", *words)
        assert done.exit_code == 1, words
        assert out.read_text() == "mine"
    assert {p.name for p in tmp_path.iterdir()} == {"r.html", "text.vmfb"}


def test_diff_page_shows_equal_and_different_bundles(files):
    done = invoke("diff", files / "m.vmfb", files / "m.vmfb", "--json")
    same = json.loads(done.stdout)
    assert {row["state"] for row in same["kernels"]} == {"same"}
    assert all(row["first"] == row["second"] for row in same["whole"])
    done = invoke("diff", files / "m.vmfb", files / "o0.vmfb")
    assert done.exit_code == 0, done.output
    assert "added" in done.output
    assert "peak of live values" in done.output


def test_diff_compares_a_shared_kernel_at_each_of_its_places():
    """The narrow network's layers share a kernel; those of the wide one do not."""

    def network(width):
        first, wide = (np.eye(256, n, dtype="f") for n in (256, width))

        def f(x):
            with jax.named_scope("first"):
                x = jnp.tanh(x @ first)
            with jax.named_scope("wide"):
                return jnp.tanh(x @ wide)

        return aotc.compile(f, np.ones((8, 256), "f"))

    found = aotc.diff(network(1024), network(256))
    rows = {("first" if "first" in row.loc else "wide"): row for row in found.kernels if "matmul" in row.kernel}
    assert len({row.kernel for row in rows.values()}) == 1, "the layers share no kernel"
    assert {name: row.state for name, row in rows.items()} == {"first": "same", "wide": "changed"}
    assert rows["first"].first == rows["first"].second
    assert rows["wide"].first > 2 * rows["wide"].second
    assert "removed" not in {row.state for row in found.kernels}


def test_kernels_of_repeated_layers_have_one_row():
    def facts(text):
        steps = [{"kernel": "k0_mul", "runs": 1, "ns": 5.0, "loc": f"jit(f)/block_{n}/mul at f.py:3"} for n in range(4)]
        return {"kernels": {"k0_mul": {"text": text, "loc": "jit(f)/block_0/mul at f.py:3"}}, "steps": steps}

    (row,) = compare_kernels(facts("def k0_mul(x)"), facts("def k0_mul(y)"))
    assert (row.state, row.first, row.second, row.loc) == ("changed", 20.0, 20.0, "jit(f)/block_0/mul at f.py:3")


def test_kernels_are_paired_by_text_before_names():
    def facts(**kernels):
        rows = {n: {"text": f"def {n}({t})", "loc": "", "code_bytes": 1} for n, t in kernels.items()}
        steps = [{"kernel": n, "runs": 2, "ns": 5.0, "bytes": 3} for n in kernels]
        memory = {"peak": 1, "arenas": {"cpu": 1}}
        return {
            "path": "",
            "bytes": 1,
            "work": 1,
            "path_ns": 1,
            "kernels": rows,
            "steps": steps,
            "memory": memory,
            "weights": [],
        }

    found = compare_kernels(facts(a="x", b="y", c="z"), facts(b="x", a="q", d="w"))
    assert [(r.before, r.kernel, r.state) for r in found] == [
        ("a", "b", "same"), ("b", "b", "removed"), ("c", "c", "removed"),
        ("", "a", "added"), ("", "d", "added"),
    ]  # fmt: skip
    assert found[0].first == 10.0
