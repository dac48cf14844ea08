"""Files that are mapped while they are in use: copied if asked for, and told of when somebody overwrites them."""

import os

import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.limits import EAGER_BYTES

pytestmark = pytest.mark.ir

X = np.arange(4, dtype="f4")


@pytest.fixture
def path(tmp_path):
    """The tiny bundle in a file."""
    path = tmp_path / "m.vmfb"
    path.write_bytes(tiny.bundle())
    return path


def cut(path):
    os.truncate(path, 100)


def overwrite(path):
    data = path.read_bytes()
    path.write_bytes(bytes(len(data)))
    os.utime(path, (1, 1))


@pytest.mark.parametrize("damage", [cut, overwrite])
@pytest.mark.parametrize("function", ["main", "grow", "upto"])
def test_a_file_that_is_overwritten_is_told_of_before_it_is_touched(path, damage, function):
    module = aotc.load(path)
    damage(path)
    arguments = {"main": (X, X), "grow": (X,), "upto": (np.int64(3),)}[function]
    with pytest.raises(BundleError, match=r"m\.vmfb: error: the file was overwritten while it was in use") as caught:
        module.invoke(function, *arguments)
    assert "copy=True" in str(caught.value)


@pytest.mark.parametrize("damage", [cut, overwrite])
def test_a_copy_does_not_care(path, damage):
    module = aotc.load(path, copy=True)
    damage(path)
    assert module(X, X).tolist() == [0, 2, 4, 6]
    assert module.stats()["constants_copied"] is False  # it lies where it was read to


def test_a_file_that_is_replaced_is_another_one(path):
    module = aotc.load(path)
    manifest, segments = tiny.parts()
    write_bundle(path, {**manifest, "name": "other"}, segments)
    assert module(X, X).tolist() == [0, 2, 4, 6]
    path.unlink()
    assert module.invoke("grow", X)[0].shape == (4,)


def test_a_buffer_may_be_copied_too():
    data = bytearray(tiny.bundle())
    module = aotc.load(data, copy=True)
    data[:] = bytes(len(data))
    assert module(X, X).tolist() == [0, 2, 4, 6]


def test_a_large_segment_that_is_gone(tmp_path):
    path = tmp_path / "m.vmfb"
    manifest, _ = tiny.parts()
    empty = {**manifest, "functions": {}, "variants": []}
    write_bundle(path, empty, [("large", bytes(EAGER_BYTES + 1))])
    bundle = open_bundle(path)
    os.truncate(path, 4096)
    with pytest.raises(BundleError, match="the file was overwritten while it was in use"):
        bundle.verify_all()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "/proc/self/cmdline"])
def test_devices_are_no_bundles(place, copy):
    """One that never ends is not read to its end."""
    with pytest.raises(BundleError, match="not an aotc bundle"):
        aotc.load(place, copy=copy)


@pytest.mark.parametrize("copy", [False, True])
def test_external_weights_are_copied_with_the_bundle(tmp_path, copy):
    from test_external_weights import grown, with_external

    module = aotc.load(with_external(tmp_path), copy=copy)
    os.truncate(tmp_path / "w.safetensors", 8)
    if copy:
        assert len(grown(module)) == 4
    else:
        with pytest.raises(BundleError, match=r"w\.safetensors: error: the file was overwritten"):
            grown(module)
