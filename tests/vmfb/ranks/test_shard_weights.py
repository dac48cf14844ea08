"""Weights of ranks: parts cut out of checkpoints, which only the own file of a rank is needed for."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.rank_cases import run_threads

import aotc
from aotc.vmfb.ranks.threads import thread_links
from aotc.vmfb.weights import shards
from aotc.vmfb.weights.shards import shard_weights
from aotc.vmfb.weights.tensors import read_tensors, write_tensors

MESH = {"data": 2, "model": 4}
RNG = np.random.default_rng(0)
PARAMS = {
    "v": RNG.normal(size=(16, 8)).astype("f4"), "w": RNG.normal(size=(8, 16)).astype("f4"),
    "b": RNG.normal(size=16).astype("f4"), "s": np.array(3, "i4"),
    "h": RNG.normal(size=(4, 8, 3)).astype(ml_dtypes.bfloat16),
}  # fmt: skip
X = RNG.normal(size=(4, 8)).astype("f4")
CUT = {"v": P("model", None), "w": P(None, "model"), "b": P(), "s": P(), "h": P(None, ("data", "model"), None)}


def model(params, x):
    h = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
    return h * params["s"] + params["h"].astype("f4").sum((0, 2))


def compiled(cut=None, mesh=None, **flags):
    shardings = cut or CUT, P("data", None)
    flags = {"bind": ["params"], **flags}
    return aotc.compile(model, PARAMS, X, mesh=mesh or MESH, in_shardings=shardings, out_shardings=P(), **flags)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a bundle, and a checkpoint of its weights in one file and in two."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "model.vmfb").write_bytes(compiled())
    arrays = {f"params/{name}": value for name, value in PARAMS.items()}
    write_tensors(folder / "whole.safetensors", arrays)
    names = list(arrays)
    files = {"a-1.safetensors": names[:2], "a-2.safetensors": names[2:]}
    for file, some in files.items():
        write_tensors(folder / file, {name: arrays[name] for name in some})
    index = {"metadata": {"total_size": 0}, "weight_map": {n: file for file, some in files.items() for n in some}}
    (folder / "a.safetensors.index.json").write_text(json.dumps(index))
    return folder


def results(folder, weights, verify=True):
    def call(link):
        module = aotc.load(folder / "model.vmfb", ranks=link, weights=weights, verify=verify)
        return module(*module.shard(X))

    return run_threads(thread_links(8), call)


def check(found):
    for result in found:
        assert not isinstance(result, Exception), result
        np.testing.assert_allclose(result, jax.jit(model)(PARAMS, X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpoint", ["whole.safetensors", "a.safetensors.index.json"])
def test_each_rank_reads_the_file_of_its_parts(made, tmp_path, checkpoint):
    written = shard_weights(made / "model.vmfb", made / checkpoint, tmp_path / "out")
    assert [row.ranks for row in written] == [[rank] for rank in range(8)]
    assert written[7].file == "model-data1-model3.safetensors"
    part = read_tensors(tmp_path / "out" / written[7].file)
    np.testing.assert_array_equal(part["params/w"], PARAMS["w"][:, 12:])
    np.testing.assert_array_equal(part["params/v"], PARAMS["v"][12:])
    np.testing.assert_array_equal(part["params/h"], PARAMS["h"][:, 7:])
    np.testing.assert_array_equal(part["params/s"], PARAMS["s"])
    check(results(made, tmp_path / "out"))
    check(results(made, tmp_path / "out" / "shards.json"))


@pytest.mark.parametrize("checkpoint", ["whole.safetensors", "a.safetensors.index.json"])
def test_a_whole_checkpoint_is_cut_at_load(made, checkpoint):
    check(results(made, made / checkpoint))


def test_ranks_with_the_same_parts_share_a_file(tmp_path):
    cut = {**CUT, "h": P()}
    path = tmp_path / "tp.vmfb"
    path.write_bytes(compiled(cut))
    write_tensors(tmp_path / "w.safetensors", {f"params/{name}": value for name, value in PARAMS.items()})
    written = shard_weights(path, tmp_path / "w.safetensors", tmp_path)
    assert [(row.file, row.ranks) for row in written] == [(f"tp-model{n}.safetensors", [n, n + 4]) for n in range(4)]
    table = json.loads((tmp_path / "shards.json").read_text())
    assert table["files"][3]["ranks"] == [3, 7]
    assert table["weights"]["params/w"]["cut"] == "-, model"


def test_a_rank_needs_no_other_file(made, tmp_path):
    written = shard_weights(made / "model.vmfb", made / "whole.safetensors", tmp_path)
    link, *_ = thread_links(8)
    for row in written[1:]:
        os.unlink(tmp_path / row.file)
    assert aotc.load(made / "model.vmfb", ranks=link, weights=tmp_path).weights["params/w"] == "f32[8, 4]"


def test_names_of_a_checkpoint_may_leave_out_the_root_and_have_dots(made, tmp_path):
    write_tensors(tmp_path / "hf.safetensors", PARAMS)
    shard_weights(made / "model.vmfb", tmp_path / "hf.safetensors", tmp_path / "out")
    check(results(made, tmp_path / "out"))


def test_a_damaged_file_is_found_by_verify(made, tmp_path):
    written = shard_weights(made / "model.vmfb", made / "whole.safetensors", tmp_path)
    path = tmp_path / written[0].file
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    link = thread_links(8)[0]
    aotc.load(made / "model.vmfb", ranks=link, weights=tmp_path)
    with pytest.raises(aotc.BundleError, match="damaged: their sha256 differs"):
        aotc.load(made / "model.vmfb", ranks=link, weights=tmp_path, verify=True)


def test_shards_of_another_mesh_are_refused(made, tmp_path):
    other = tmp_path / "other.vmfb"
    other.write_bytes(compiled(mesh={"data": 4, "model": 2}))
    shard_weights(other, made / "whole.safetensors", tmp_path / "out")
    with pytest.raises(aotc.BundleError, match=r"(?s)shards for another bundle.*data=4 x model=2.*data=2 x model=4"):
        aotc.load(made / "model.vmfb", ranks=thread_links(8)[0], weights=tmp_path / "out")


def test_all_differences_of_a_checkpoint_are_listed(made, tmp_path):
    wrong = {f"params/{name}": value for name, value in PARAMS.items() if name != "b"}
    wrong |= {"params/w": PARAMS["w"].T.copy(), "params/z": PARAMS["b"]}
    write_tensors(tmp_path / "w.safetensors", wrong)
    with pytest.raises(aotc.BundleError) as error:
        shard_weights(made / "model.vmfb", tmp_path / "w.safetensors", tmp_path / "out")
    text = str(error.value)
    for part in ("params/b is missing, f32[16]", "no weight 'params/z'", "params/w is f32[16, 8], expected f32[8, 16]"):
        assert part in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}', "{}"])
def test_a_bad_index_is_refused(made, tmp_path, text):
    path = tmp_path / "x.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(aotc.BundleError, match=r"index"):
        shard_weights(made / "model.vmfb", path, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"mesh": {"axes": [["a", 2]]}, "files": [{}], "weights": {}}'])
def test_a_bad_table_is_refused(made, tmp_path, text):
    (tmp_path / "shards.json").write_text(text)
    with pytest.raises(aotc.BundleError, match="not a table of shards"):
        aotc.load(made / "model.vmfb", ranks=thread_links(8)[0], weights=tmp_path)


def test_a_bundle_of_one_device_has_no_shards(made, tmp_path):
    aotc.compile(model, PARAMS, X, bind=["params"], output=tmp_path / "one.vmfb")
    with pytest.raises(aotc.BundleError, match=r"(?s)one device.*update-weights"):
        shard_weights(tmp_path / "one.vmfb", made / "whole.safetensors", tmp_path / "out")


def test_a_sharded_bundle_has_no_weights_of_its_own(made):
    with pytest.raises(aotc.CompileError, match=r"(?s)several ranks.*shard-weights"):
        compiled(weights="unpacked")
    run = [sys.executable, "-m", "aotc", "update-weights", str(made / "model.vmfb"), str(made / "whole.safetensors")]
    found = subprocess.run(run, capture_output=True, text=True)
    assert found.returncode == 1
    assert "shard-weights" in found.stderr


def test_whole_arrays_are_refused_with_the_way_to_parts(made, tmp_path):
    shard_weights(made / "model.vmfb", made / "whole.safetensors", tmp_path)
    link = thread_links(8)[5]
    module = aotc.load(made / "model.vmfb", ranks=link)
    with pytest.raises(aotc.CallError, match=r"(?s)whole array.*f32\[8, 16\].*f32\[8, 4\].*module.shard"):
        module.bind({"params": PARAMS})
    with pytest.raises(aotc.CallError, match=r"(?s)params/w is the whole array.*shard-weights"):
        aotc.load(made / "model.vmfb", ranks=link, weights={"params": PARAMS})
    module = aotc.load(made / "model.vmfb", ranks=link, weights=tmp_path)
    with pytest.raises(aotc.CallError, match=r"(?s)params/w is the whole array.*shard-weights"):
        module.update_weights({"params/w": PARAMS["w"]})


def test_an_update_takes_a_folder_of_shards(made, tmp_path):
    shard_weights(made / "model.vmfb", made / "whole.safetensors", tmp_path / "old")
    halves = {f"params/{n}": v if n == "s" else (v / 2).astype(v.dtype) for n, v in PARAMS.items()}
    write_tensors(tmp_path / "new.safetensors", halves)
    shard_weights(made / "model.vmfb", tmp_path / "new.safetensors", tmp_path / "new")

    def call(link):
        module = aotc.load(made / "model.vmfb", ranks=link, weights=tmp_path / "old")
        module.update_weights(tmp_path / "new")
        return module(*module.shard(X))

    wanted = jax.jit(model)({n: halves[f"params/{n}"] for n in PARAMS}, X)
    for found in run_threads(thread_links(8), call):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_command_writes_the_folder_without_jax(made, tmp_path):
    code = (
        "import sys; sys.modules['jax'] = sys.modules['jaxlib'] = None; from aotc_cli.main import main; "
        "sys.argv = ['aotc', 'shard-weights', *sys.argv[1:]]; main()"
    )
    args = [str(made / "model.vmfb"), str(made / "whole.safetensors"), "-o", str(tmp_path)]
    found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "model-data1-model3.safetensors" in found.stdout
    assert (tmp_path / "shards.json").exists()


SMALL = 4 << 10


@pytest.mark.parametrize("layout", [P("model", None, None), P(None, "model", None), P(None, None, "model")])
def test_pieces_join_to_the_part(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PIECE_BYTES", SMALL)
    x = np.arange(8 * 12 * 256, dtype="f4").reshape(8, 12, 256)
    data = aotc.compile(lambda w, y: (w + y).sum(0), x, x[0], mesh={"model": 4}, in_shardings=(layout, P()),
                        out_shardings=P(), bind=["w"])  # fmt: skip
    (tmp_path / "m.vmfb").write_bytes(data)
    write_tensors(tmp_path / "w.safetensors", {"w": x})
    for n, row in enumerate(shard_weights(tmp_path / "m.vmfb", tmp_path / "w.safetensors", tmp_path)):
        at = [slice(None)] * 3
        (dim,) = (k for k, axis in enumerate(layout) if axis)
        at[dim] = slice(n * x.shape[dim] // 4, (n + 1) * x.shape[dim] // 4)
        np.testing.assert_array_equal(read_tensors(tmp_path / row.file)["w"], x[tuple(at)])


def test_memory_is_bounded(tmp_path):
    """A checkpoint of 256 MiB is cut by columns in far less memory."""
    w = jax.ShapeDtypeStruct((8192, 8192), "f4")
    data = aotc.compile(lambda w, x: x @ w, w, jax.ShapeDtypeStruct((1, 8192), "f4"), mesh={"m": 2},
                        in_shardings=(P(None, "m"), P()), out_shardings=P(None, "m"), bind=["w"])  # fmt: skip
    (tmp_path / "m.vmfb").write_bytes(data)
    write_tensors(tmp_path / "w.safetensors", {"w": np.broadcast_to(np.float32(1), (8192, 8192))})
    code = (
        "import sys, resource; from aotc.vmfb.weights.shards import shard_weights; "
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; shard_weights(*sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    args = [str(tmp_path / "m.vmfb"), str(tmp_path / "w.safetensors"), str(tmp_path)]
    found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, check=True, text=True)
    assert int(found.stdout) < 120 << 10


def test_a_gang_maps_the_files_of_its_ranks(made, tmp_path):
    shard_weights(made / "model.vmfb", made / "whole.safetensors", tmp_path)
    with aotc.gang(made / "model.vmfb", weights=tmp_path) as module:
        assert str(module.signature) == "main(x: f32[4, 8]) -> (result: f32[4, 8])"
        check([module(X)])
