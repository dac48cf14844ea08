"""Constants in a safetensors file beside the bundle."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.vmfb.dtypes import DTYPES, to_numpy

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    import jax

    folder = tmp_path_factory.mktemp("weights")
    rng = np.random.default_rng(0)
    w = [rng.standard_normal(s).astype("f") for s in ((7, 33), (33, 5))]
    x = rng.standard_normal((3, 7)).astype("f")
    data = aotc.compile(jax.jit(lambda x: jax.numpy.tanh(x @ w[0]) @ w[1]), x, weights=str(folder / "w.safetensors"))
    (folder / "net.vmfb").write_bytes(data)
    return folder, x, np.tanh(x @ w[0]) @ w[1]


def test_the_file_beside_the_bundle_is_used(compiled):
    folder, x, expected = compiled
    module = aotc.load(str(folder / "net.vmfb"), verify=True)
    np.testing.assert_allclose(module.invoke("main", x)[0], expected, rtol=1e-5, atol=1e-5)


def test_the_safetensors_library_reads_the_file(compiled):
    numpy_files = pytest.importorskip("safetensors.numpy")
    folder, _, _ = compiled
    tensors = numpy_files.load_file(folder / "w.safetensors")
    assert any(t.dtype == np.float32 for t in tensors.values())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_constants_of_every_type(tmp_path, name):
    import jax

    dtype = to_numpy(name)
    w = (np.arange(12) % 7 % 2).astype(dtype).reshape(3, 4)
    file = tmp_path / "w.safetensors"
    with jax.enable_x64(True):
        data = aotc.compile(jax.jit(lambda n: jax.lax.dynamic_slice_in_dim(w, n, 1)), np.int32(0), weights=str(file))
    (tmp_path / "n.vmfb").write_bytes(data)
    (row,) = aotc.load(tmp_path / "n.vmfb", verify=True).invoke("main", np.int32(2))
    assert row.tobytes() == w[2:].tobytes()
    library = pytest.importorskip("safetensors")
    with library.safe_open(file, "np") as opened:
        assert len(opened.keys()) >= 1


def test_a_file_that_cannot_be_written_is_named():
    import jax

    w = np.arange(6, dtype="f").reshape(2, 3)
    with pytest.raises(aotc.CompileError, match=r"^/dev/full/w\.safetensors: error: Not a directory$"):
        aotc.compile(jax.jit(lambda x: x @ w), np.ones((4, 2), "f"), weights="/dev/full/w.safetensors")


def test_a_missing_file_is_named(compiled, tmp_path):
    folder, _, _ = compiled
    lonely = tmp_path / "net.vmfb"
    lonely.write_bytes((folder / "net.vmfb").read_bytes())
    with pytest.raises(aotc.BundleError, match=r"w\.safetensors"):
        aotc.load(str(lonely))
