"""``aotc.Bundle``: bytes that can be saved, and the cell of a notebook that is run again."""

import copy
import errno
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import msgpack
import numpy as np
import pytest

import aotc
from aotc.vmfb import bundle as fmt

pytestmark = pytest.mark.cpu

X = np.arange(4, dtype="f4")


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile(lambda x: x + 1, X)


def test_a_bundle_behaves_like_bytes(bundle, tmp_path):
    plain = bytes(bundle)
    assert type(bundle) is aotc.Bundle
    assert isinstance(bundle, bytes)
    assert (bundle, hash(bundle), len(bundle)) == (plain, hash(plain), len(plain))
    assert memoryview(bundle) == memoryview(plain)
    assert type(bundle[:8]) is bytes
    assert msgpack.unpackb(msgpack.packb(bundle)) == plain
    assert np.frombuffer(bundle, np.uint8).size == len(plain)
    for other in (pickle.loads(pickle.dumps(bundle)), copy.deepcopy(bundle), aotc.upgrade(bundle)):
        assert type(other) is aotc.Bundle
        assert other == plain
    path = tmp_path / "plain.vmfb"
    assert path.write_bytes(bundle) == len(plain)
    for source in (bundle, plain, path):
        np.testing.assert_array_equal(aotc.load(source)(X), X + 1)


def test_the_repr_of_a_bundle_is_one_line(bundle):
    want = f"<aotc.Bundle of {len(bundle):,} bytes>"
    assert repr(bundle) == str(bundle) == f"{bundle}" == want


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_save_writes_the_file(bundle, tmp_path, kind):
    path = tmp_path / "m.vmfb"
    assert bundle.save(kind(path)) is None
    assert path.read_bytes() == bundle
    assert [p.name for p in tmp_path.iterdir()] == ["m.vmfb"]


def test_save_replaces_the_file_and_keeps_a_link(bundle, tmp_path):
    (tmp_path / "m.vmfb").write_bytes(b"old")
    (tmp_path / "link.vmfb").symlink_to("m.vmfb")
    before = (tmp_path / "m.vmfb").stat().st_ino
    bundle.save(tmp_path / "link.vmfb")
    assert (tmp_path / "link.vmfb").is_symlink()
    assert (tmp_path / "m.vmfb").read_bytes() == bundle
    assert (tmp_path / "m.vmfb").stat().st_ino != before


@pytest.mark.parametrize("place", ["missing/m.vmfb", ".", "a\0b"])
def test_save_refuses_an_unwritable_path(bundle, tmp_path, place):
    with pytest.raises(aotc.BundleError, match="cannot write the bundle"):
        bundle.save(f"{tmp_path}/{place}")
    with pytest.raises(TypeError, match="PathLike"):
        bundle.save(3)


def test_a_full_disk_leaves_the_old_file(bundle, tmp_path, monkeypatch):
    path = tmp_path / "m.vmfb"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fmt.os, "fsync", fail)
    with pytest.raises(aotc.BundleError, match=r"No space left(.|\n)*free bytes(.|\n)*unchanged"):
        bundle.save(path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.vmfb"]


# The cell of a notebook: how it writes, and what it compiles the second time, beside the first module.
CELL = """
import sys, time
import jax.numpy as jnp, numpy as np, aotc

how, size, change = sys.argv[1], int(sys.argv[2]), sys.argv[3]
path = sys.argv[4]
x = np.arange(4, dtype="f4")

def cell(number, size):
    table = np.random.default_rng(0).standard_normal((size, 4)).astype(np.float32)  # stored as it is
    table[[1, -1]] = number
    table[:, 0] = np.arange(size)
    data = aotc.compile(lambda x, i: x + jnp.asarray(table)[i], x, np.int32(0))
    data.save(path) if how == "save" else open(path, "wb").write(data)
    return aotc.load(path)

first = cell(1, size)
last = np.int32(size - 1)
want = first(x, last).tolist()
assert want == [size - 1, 2, 3, 4]
time.sleep(0.02)
second = cell(2, {"smaller": size // 2, "equal": size, "larger": 2 * size}[change])
time.sleep(0.02)
assert second(x, np.int32(1)).tolist() == [1, 3, 4, 5]
for call in (lambda: first(x, last), lambda: first.submit("main", x, last).result()[0]):
    try:
        print(call().tolist() == want)
    except aotc.BundleError as error:
        print("overwritten" in str(error))
        assert how != "save" and size > 1 << 18
    else:
        assert how == "save" or size < 1 << 18
"""


FAST = {("open", 64, "equal"), ("open", 1 << 19, "smaller"), ("save", 1 << 19, "equal")}
CELLS = [
    pytest.param(how, rows, change, marks=[] if (how, rows, change) in FAST else pytest.mark.slow)
    for how, rows in (("open", 64), ("open", 1 << 19), ("save", 1 << 19))
    for change in ("smaller", "equal", "larger")
]


@pytest.mark.parametrize(("how", "rows", "change"), CELLS)
def test_a_notebook_cell_that_saves_a_loaded_bundle_runs_again(tmp_path, how, rows, change):
    command = [sys.executable, "-c", CELL, how, str(rows), change, tmp_path / "f.vmfb"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\nTrue\n"), done.stderr


@pytest.mark.parametrize("rows", [64, 1 << 21])
@pytest.mark.parametrize("place", ["inside", "beside"])
def test_calls_refuse_large_weights_overwritten_in_their_file(tmp_path, rows, place):
    w = np.arange(rows * 4, dtype="f4")
    file = tmp_path / ("m.vmfb" if place == "inside" else "w.safetensors")
    model = {"one": lambda w, i: w[i], "two": lambda w, i: w[i] * 2}
    args = {name: (w, np.int32(0)) for name in model}
    weights = str(file) if place == "beside" else "unpacked"
    aotc.compile(model, args=args, bind=["w"], weights=weights).save(tmp_path / "m.vmfb")
    module, last = aotc.load(tmp_path / "m.vmfb"), np.int32(rows * 4 - 1)
    functions = [getattr(module, name) for name in model]
    want = [float(f(last)) for f in functions]
    assert want == [w[-1], w[-1] * 2]
    data = bytearray(file.read_bytes())
    data[-(1 << 10) :] = bytes(1 << 10)
    file.write_bytes(data)
    time.sleep(0.02)
    for f, value in zip(functions, want):
        if rows == 64:
            assert float(f(last)) == value
            continue
        with pytest.raises(aotc.BundleError, match="overwritten"):
            f(last)
        with pytest.raises(aotc.BundleError, match="overwritten"):
            f.submit(last).result()
