"""Typed results of the tools in Python: their fields, their text, their HTML."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import aotc

pytest.importorskip("numba")
pytestmark = pytest.mark.cpu

X = np.arange(12, dtype="f4").reshape(3, 4)


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile(lambda x, w: jnp.tanh(x @ w) + 1, X, np.ones((4, 4), "f4"))


def test_inspect_result_has_functions_variants_and_segments(bundle, tmp_path):
    found = aotc.inspect(bundle)
    assert found.size == len(bundle)
    assert found.targets == bundle.targets
    assert [str(spec) for spec in found.functions["main"].inputs] == ["x: f32[3, 4]", "w: f32[4, 4]"]
    (variant,) = found.variants
    assert variant.top
    assert sum(kernel.share for kernel in variant.top) == pytest.approx(1)
    assert {kernel.name for kernel in variant.top} <= {kernel.name for kernel in variant.kernels}
    assert not any(kernel.measured for kernel in variant.top)
    text = str(found)
    assert len(text.splitlines()) <= 24
    assert "main(x: f32[3, 4], w: f32[4, 4]) -> " in text
    assert "<code>" not in found._repr_html_()
    assert "slowest kernels of main" in found._repr_html_()
    bundle.save(tmp_path / "m.vmfb")
    assert aotc.inspect(tmp_path / "m.vmfb").segments == found.segments
    assert "sha256" in str(found.details(segments=True).blocks)


def test_inspect_counts_many_arguments():
    params = {f"layer{n}": {"w": np.ones((4, 4), "f4"), "b": np.ones(4, "f4")} for n in range(9)}
    made = aotc.compile(lambda params, x: sum(x @ p["w"] + p["b"] for p in params.values()), params, X)
    assert "main(params: 18 arrays of 720 B, x: f32[3, 4]) -> " in str(aotc.inspect(made))


def test_inspect_states_assumed_sizes():
    kind = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), "float32")
    found = aotc.inspect(aotc.compile(lambda x: jnp.sin(x) @ np.ones((4, 4), "f4"), kind))
    assert found.dims == ("b",)
    assert found.variants[0].timed == "main (b=16 assumed)"


def test_tools_refuse_files_that_are_not_bundles(tmp_path):
    (tmp_path / "m.vmfb").write_bytes(b"nothing")
    with pytest.raises(aotc.BundleError):
        aotc.inspect(tmp_path / "m.vmfb")


# ---------------------------------------------------------------- diff


def small(w, scale=1.0):
    return aotc.compile(lambda x: jnp.tanh(x @ w) * scale, X)


def test_diff_of_equal_bundles_is_equal(bundle):
    found = aotc.diff(bundle, bundle)
    assert found.equal
    assert "0 not" in str(found)
    assert {row.state for row in found.kernels} == {"same"}


def test_diff_reports_that_all_weights_differ():
    first, second = (small(np.random.default_rng(n).normal(size=(4, 64)).astype("f4")) for n in (0, 1))
    found = aotc.diff(first, second, names=("old", "new"))
    assert not found.equal
    assert {row.state for row in found.weights} == {"changed"}
    assert {row.state for row in found.kernels} == {"same"}
    assert "all differ" in str(found)
    assert "old" in found._repr_html_()


def test_diff_lists_bound_weights_by_name(tmp_path):
    params = {"w": np.ones((4, 3), "f4"), "b": np.zeros(3, "f4")}
    made = []
    for number, w in enumerate((1, 2)):
        own = aotc.compile(
            lambda params, x: x @ params["w"] + params["b"], {**params, "w": w * params["w"]}, X, bind=["params"],
            weights="unpacked", output=tmp_path / f"{number}.vmfb",
        )  # fmt: skip
        made.append(own)
    found = aotc.diff(tmp_path / "0.vmfb", tmp_path / "1.vmfb")
    assert {row.name: row.state for row in found.weights} == {"params/w": "changed", "params/b": "same"}


def test_diff_pairs_kernels_by_scope_and_lists_options(bundle):
    first = small(np.ones((4, 64), "f4"))
    second = aotc.compile(lambda x: jnp.tanh(x @ np.ones((4, 64), "f4")) * 1.0, X, opt_level=1)
    found = aotc.diff(first, second)
    assert [(f.name, f.first, f.second) for f in found.facts] == [("option opt_level", "2", "1")]
    assert "the same" in str(found)
    assert [f.name for f in aotc.diff(first, bundle).facts] == ["function"]


# ---------------------------------------------------------------- lint


def test_lint_result_has_a_report_per_function():
    found = aotc.lint(lambda x: jnp.tanh(x) @ x.T, X)
    assert found.compiles
    (report,) = found
    assert len(found) == 1
    assert found[0] is report
    assert {row.status for row in report.rows} == {"native"}
    assert "it compiles" in str(found)
    assert "dot_general" in found._repr_html_()


# ---------------------------------------------------------------- check


def test_check_result_has_errors_and_refuses_unknown_oracles():
    found = aotc.check(lambda x: jnp.tanh(x) @ x.T, X)
    assert found.agrees
    assert found.arguments == ""
    (error,) = found.errors
    assert 0 <= error.relative < 1e-4
    assert "agrees with the reference; " in str(found)
    assert "<div" in found._repr_html_()
    random = aotc.check(lambda x: jnp.tanh(x), jax.ShapeDtypeStruct((3,), "float32"), oracle="jax")
    assert random.arguments == "random arguments, seed 0"
    assert "agrees with XLA" in str(random)
    with pytest.raises(aotc.ArgumentValueError, match="unknown oracle"):
        aotc.check(jnp.sin, X, oracle="torch")


# ---------------------------------------------------------------- explain


def test_explain_results_have_fields_text_and_html(bundle):
    for subject, title in (("schedule", "on one core"), ("memory", "alive at step"), ("fusion", "for cpu:")):
        found = aotc.explain(subject, bundle)
        assert {"schedule": "rows", "memory": "steps", "fusion": "regions"}[subject] in dir(found)
        assert title in " ".join(str(found).split())
        assert "<table>" in found._repr_html_()
    assert str(aotc.explain("affinity", jnp.sin, X)) == "the model names no device"
    assert aotc.explain("schedule", jnp.sin, X).rows
    with pytest.raises(aotc.ArgumentValueError, match="compiled already"):
        aotc.explain("memory", bundle, opt_level=1)
    with pytest.raises(aotc.ArgumentValueError, match="unknown subject"):
        aotc.explain("weather", bundle)


# ---------------------------------------------------------------- bench


def test_bench_result_has_latency_throughput_and_ratio(bundle):
    found = aotc.bench(bundle, bundle, seconds=0.02, rounds=2, callers=(2,), per_dispatch=True, inputs=[X])
    first, second = found.bundles
    assert first.latency["p50"].value > 0
    assert second.throughput[0].callers == 2
    assert found.ratio is not None
    assert {row.kernel for row in first.dispatches} <= {k.name for k in aotc.inspect(bundle).variants[0].kernels}
    assert "import and load" in str(found)
    assert "2 callers, calls/s" in found._repr_html_()
    with pytest.raises(TypeError, match=r"(?s)bench has no keyword 'second'.*try: seconds=\.\.\."):
        aotc.bench(bundle, second=1)


# ---------------------------------------------------------------- profile and report


def test_profile_result_has_shares_and_seconds(bundle):
    found = aotc.profile(bundle, inputs=[X], repeat=1)
    assert sum(kernel.share for kernel in found.kernels) == pytest.approx(1)
    assert found.seconds == pytest.approx(sum(k.runs * k.seconds for k in found.kernels))
    assert "of @main" in str(found)
    assert "<table>" in found._repr_html_()
    aotc.compile(lambda x, w: jnp.tanh(x @ w) + 1, X, np.ones((4, 4), "f4"), costs=found.record)
    with pytest.raises(aotc.CallError, match="no function"):
        aotc.profile(bundle, function="other")


def test_report_result_can_be_saved_and_shown(bundle, tmp_path):
    found = aotc.report(bundle, name="m.vmfb")
    found.save(tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text() == found.html
    assert str(found).startswith(f"{found.kernels} kernel")
    assert found._repr_html_().startswith("<iframe ")
    assert "<script" not in found._repr_html_()


def test_bench_measures_the_memory_of_the_bundle_only(tmp_path):
    aotc.compile(jnp.sin, np.ones(3, np.float32), output=tmp_path / "m.vmfb")
    more = np.ones(1 << 25)  # 268 MB
    (one,) = aotc.bench(tmp_path / "m.vmfb", seconds=0.02, rounds=1).bundles
    assert 1 << 23 < one.memory_after_load < more.nbytes


def test_diff_shows_both_columns_of_an_option_that_one_bundle_has():
    from aotc.tools.page.compare import BundleDiff, DiffFact

    facts = (DiffFact("option tuning", "", "2 choices of aotc tune"),)
    text = str(BundleDiff("a.vmfb", "b.vmfb", facts, (), (), ()))
    head, _, row = [line for line in text.splitlines() if line.strip()][:3]
    assert head.split() == ["differs", "a.vmfb", "b.vmfb"]
    assert row.split(maxsplit=3)[2:] == ["none", "2 choices of aotc tune"]


def test_diff_counts_the_choices_of_a_tuning_record():
    from aotc.tools.page.compare import _option_text

    assert _option_text("tuning", {"version": 1, "choices": [{}, {}]}) == "2 choices of aotc tune"
    assert _option_text("tuning", {}) == ""
    assert _option_text("opt_level", 0) == "0"
