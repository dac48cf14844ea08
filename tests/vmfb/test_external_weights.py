"""Weights in a safetensors file beside a bundle: found, mapped, copied, refused. Without the compiler."""

import json
from hashlib import sha256

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir


def safetensors(tensors, pad=0):
    """A safetensors file of F32 tensors by name."""
    header, offset, body = {}, 0, b""
    for name, x in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset, body = offset + x.nbytes, body + x.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64 + pad)
    return len(text).to_bytes(8, "little") + text + body


def header(text):
    """A safetensors file that is only a header."""
    return len(text).to_bytes(8, "little") + text


def with_external(folder, offset=0):
    """The tiny bundle in ``folder``, its weight in w.safetensors; returns the bundle's path."""
    w = np.full(16, 3, np.float32)
    digest = sha256(w.tobytes()).digest()
    row = {"name": "w", "dtype": "f32", "shape": [16], "offset": offset, "size": 64, "sha256": digest}
    manifest, segments = tiny.parts()
    external = {"file": "w.safetensors", "tensors": [row], "size": 128}
    manifest["variants"][0]["constants"] = {"external": external}
    path = folder / "t.vmfb"
    write_bundle(path, manifest, segments)
    (folder / "w.safetensors").write_bytes(safetensors({"w": w, "zeros": np.zeros(16, np.float32)}))
    return path


def grown(module):
    return module.invoke("grow", np.arange(4, dtype=np.float32))[0].tolist()


def test_external_weights_beside_the_bundle_are_mapped(tmp_path):
    module = load(with_external(tmp_path), verify=True)
    assert grown(module) == [0, 6, 12, 18]
    assert module.stats()["constants_copied"] is False


def test_external_weights_of_another_layout_are_copied(tmp_path, monkeypatch):
    path = with_external(tmp_path)
    other = tmp_path / "weights"
    other.mkdir()
    (tmp_path / "w.safetensors").unlink()
    tensors = {"first": np.zeros(3, np.float32), "w": np.full(16, 3, np.float32)}
    (other / "w.safetensors").write_bytes(safetensors(tensors))
    monkeypatch.setenv("AOTC_WEIGHTS_PATH", str(other))
    module = load(path)
    assert grown(module) == [0, 6, 12, 18]
    assert module.stats()["constants_copied"] is True


def test_external_weights_that_are_wrong(tmp_path):
    path = with_external(tmp_path)
    weights = tmp_path / "w.safetensors"
    for data, message in [
        (safetensors({"v": np.zeros(16, np.float32)}), "no tensor 'w'"),
        (safetensors({"w": np.zeros((4, 4), np.float32)}), "is not the one that was compiled"),
        (safetensors({"w": np.zeros(16, np.float32)})[:-8], "truncated"),
        (b"junk", "not a safetensors file"),
        (header(b'{"w": 3}'), "is described by 3"),
        (header(b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": ["0", 4]}}'), "is described by"),
        (header(b'{"w": {"dtype": "F32", "shape": [null], "data_offsets": [0, 4]}}'), "has the shape"),
        (header(b"[" * 100_000), "nested without end"),
        (header(b"3"), "is not an object"),
    ]:
        weights.write_bytes(data)
        with pytest.raises(BundleError, match=message):
            load(path)
    weights.write_bytes(safetensors({"w": np.ones(16, np.float32), "zeros": np.zeros(16, np.float32)}))
    with pytest.raises(BundleError, match="sha256 differs"):
        load(path, verify=True)
    weights.unlink()
    with pytest.raises(BundleError, match="AOTC_WEIGHTS_PATH"):
        load(path)


def test_an_external_weight_of_no_known_type(tmp_path):
    path = with_external(tmp_path)
    bundle = open_bundle(path)
    manifest = {key: value for key, value in bundle.manifest.items() if key != "segments"}
    manifest["variants"][0]["constants"]["external"]["tensors"][0]["dtype"] = "f33"
    segments = [(s["name"], bytes(bundle.segment(n))) for n, s in enumerate(bundle.manifest["segments"])]
    (tmp_path / "t.vmfb").write_bytes(write_bundle(None, manifest, segments))
    with pytest.raises(BundleError, match="f33"):
        load(path)
