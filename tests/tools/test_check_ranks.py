"""``aotc check`` of sharded models: all ranks as threads, compared with the whole program on one device."""

from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.rank_cases import run_threads

import aotc
from aotc.tools import check_ranks
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.devices.cpu.executor_trials import Trial
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.cpu



@contextmanager
def shuffled(seed):
    trial = Trial()
    trial.shuffle(seed)
    native.set_trial(trial.address)
    try:
        yield
    finally:
        native.set_trial(0)


MESH = AbstractMesh((2, 2), ("data", "model"))


def function(w, x):
    h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("data", "model")))
    return {"y": jnp.tanh(h).sum(0), "h": h}


def shape(dims, *axes, mesh=MESH):
    return jax.ShapeDtypeStruct(dims, "float32", sharding=NamedSharding(mesh, P(*axes)))


W, X = shape((16, 32), None, "model"), shape((8, 16), "data", None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("check") / "model.jaxexp"
    made = jax.export.export(jax.jit(function), platforms=["cpu"])(W, X)
    path.write_bytes(made.serialize())
    path.with_suffix(".mlir").write_text(made.mlir_module())
    return path


@pytest.mark.parametrize("oracle", ["reference", "jax"])
def test_all_ranks_agree_with_one_device(exported, oracle):
    report = aotc.check(exported, oracle=oracle, ranks=4)
    assert report.agrees
    assert report.names == ("result['h']", "result['y']")
    text = str(report)
    assert "4 ranks (data=2 x model=2) ran together" in " ".join(text.split())
    assert "each op" not in text


def test_check_accepts_a_function_with_shardings_and_inputs():
    def wrong_if_cut(x):
        return x - x.mean(0)

    x = np.random.default_rng(0).standard_normal((8, 4), "f4")
    report = aotc.check(wrong_if_cut, x, mesh={"a": 2}, in_shardings=P("a"), out_shardings=P(None, "a"))
    assert report.agrees
    assert report.arguments == ""


def test_a_wrong_rank_is_a_difference(exported, monkeypatch):
    right = check_ranks.run_on_threads

    def wrong(data, mesh, name, arrays):
        h, y = right(data, mesh, name, arrays)
        y[16:] += 1
        return [h, y]

    monkeypatch.setattr(check_ranks, "run_on_threads", wrong)
    report = aotc.check(exported)
    assert not report.agrees
    assert report.results[0] is None
    assert report.results[1].count == 16


def test_wrong_arguments_and_rank_counts_are_refused(exported):
    with pytest.raises(aotc.CompileError, match=r"for 4 ranks \(data=2 x model=2\), and there are 8"):
        aotc.check(exported, ranks=8)
    with pytest.raises(aotc.CallError, match="do not fit"):
        aotc.check(exported, inputs=[np.zeros((16, 16), "f4")])
    with pytest.raises(aotc.CompileError, match="leave --bisect out"):
        aotc.check(exported, bisect=True)
    with pytest.raises(aotc.CompileError, match="is for one device and has no ranks"):
        aotc.check(lambda x: x + 1, np.zeros(3, "f4"), ranks=2)
    with pytest.raises(aotc.CompileError, match="without quantised weights"):
        aotc.check(exported, quantize_weights="int8")


def test_more_ranks_than_one_process_allows_are_refused():
    mesh = AbstractMesh((512,), ("a",))
    with pytest.raises(aotc.CompileError, match="one process checks at most 256"):
        aotc.check(jax.jit(lambda x: x.sum()), shape((512,), "a", mesh=mesh))


@pytest.mark.parametrize("ranks", [64, 128])
def test_check_agrees_with_more_ranks_than_executor_runs(ranks):
    """The executor has 32 runs; a call without one runs on its own thread, also while it waits for other ranks."""
    mesh = AbstractMesh((ranks // 8, 8), ("a", "b"))

    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, v: v - v.mean(0) * v.mean(1)[:, None], x)

    x = shape((2 * ranks // 8, 16), "a", "b", mesh=mesh)
    report = aotc.check(jax.jit(loop, out_shardings=NamedSharding(mesh, P("a", "b"))), x, ranks=ranks)
    assert report.agrees
    assert f"{ranks} ranks" in str(report)


def test_shuffled_collectives_of_more_ranks_than_runs_agree():
    """Each graph is shared and its ready commands are claimed in a random order."""
    x = np.random.default_rng(0).standard_normal((48, 40), "f4")

    def two(x):
        return x.sum(0), jnp.sort(x, 0) - x.max(1, keepdims=True), jnp.tanh(x) @ jnp.ones((40, 8), "f4")

    data = aotc.compile(two, x, mesh={"a": 48}, in_shardings=P("a"), out_shardings=(P(), P("a"), P("a")))

    def work(link):
        with aotc.load(data, ranks=link, threads=2) as module:
            return [module.gather(module(*module.shard(x))) for _ in range(2)]

    with shuffled(7):
        results = run_threads(thread_links(48), work)
    for found in results:
        assert isinstance(found, list), found
        for call in found:
            for a, b in zip(call, jax.jit(two)(x), strict=True):
                np.testing.assert_allclose(a, b, 1e-5, 1e-5)


def test_a_shard_map_has_no_program_for_one_device():
    local = jax.shard_map(partial(jax.lax.psum, axis_name="model"), mesh=MESH, in_specs=P("model"), out_specs=P())
    with pytest.raises(aotc.CompileError, match=r"jax\.shard_map describes what one rank computes"):
        aotc.check(jax.jit(local), shape((8, 4), "model", None))


def test_a_sharded_bundle_cannot_be_checked(tmp_path):
    data = aotc.compile(lambda x: x.sum(), np.zeros(4, "f4"), mesh={"a": 2}, in_shardings=P("a"))
    with pytest.raises(aotc.CompileError, match=r"holds the program of one rank(.|\n)*aotc check MODEL"):
        aotc.check(bytes(data), ranks=2)


def test_an_error_of_a_rank_reaches_the_caller(exported, monkeypatch):
    data = aotc.compile(lambda x: x.sum(), np.zeros(4, "f4"), mesh={"a": 2}, in_shardings=P("a"))
    mesh = aotc.vmfb.ranks.layout.Mesh((("a", 2),))
    links = check_ranks.thread_links

    def broken(size):
        found = links(size)
        found[1].exchange = None
        return found

    monkeypatch.setattr(check_ranks, "thread_links", broken)
    with pytest.raises(aotc.CallError, match=r"^rank 1: (.|\n)*TypeError"):
        check_ranks.run_on_threads(data, mesh, "main", [np.zeros(4, "f4")])
