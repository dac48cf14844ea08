"""Files of loaded bundles that somebody truncates, overwrites or replaces: calls go on or are refused."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.limits import EAGER_BYTES
from aotc.vmfb.memory.mapped_file import FILE_CHECK_NANOSECONDS

pytestmark = pytest.mark.ir

X = np.arange(4, dtype="f4")
CALLS = {"main": (X, X), "grow": (X,), "upto": (np.int64(3),)}


@pytest.fixture
def path(tmp_path):
    """The tiny bundle in a file, which is copied."""
    path = tmp_path / "m.vmfb"
    path.write_bytes(tiny.bundle())
    return path


@pytest.fixture
def large(tmp_path):
    """The tiny bundle with constants that are mapped."""
    path = tmp_path / "large.vmfb"
    manifest, segments = tiny.parts(weights=tiny.constants(EAGER_BYTES + 64).tobytes())
    write_bundle(path, manifest, segments)
    return path


def smaller(path):
    """A notebook cell that writes another bundle, run again."""
    path.write_bytes(path.read_bytes()[:200])


def same_size(path):
    path.write_bytes(bytes(path.stat().st_size))


def larger(path):
    path.write_bytes(path.read_bytes() + bytes(1 << 16))


def wait():
    """Wait until files are looked at again."""
    time.sleep(2 * FILE_CHECK_NANOSECONDS / 1e9)


DAMAGES = [smaller, same_size, larger]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("function", CALLS)
def test_a_small_bundle_is_copied(path, damage, function):
    module = aotc.load(path)
    want = module.invoke(function, *CALLS[function])[0].tolist()
    fresh = aotc.load(path)
    damage(path)
    for one in (module, fresh):
        assert one.invoke(function, *CALLS[function])[0].tolist() == want


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("function", CALLS)
def test_a_large_file_that_is_overwritten_is_an_error(large, damage, function, called_before):
    module = aotc.load(large)
    if called_before:
        module.invoke(function, *CALLS[function])
    damage(large)
    wait()
    for _ in range(2):
        with pytest.raises(BundleError, match=r"large\.vmfb: error: the file was overwritten while") as told:
            module.invoke(function, *CALLS[function])
    assert "Bundle.save" in str(told.value)
    with pytest.raises(BundleError, match="overwritten"):
        module.submit(function, *CALLS[function]).result()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_copy_stays(large, damage):
    module = aotc.load(large, copy=True)
    damage(large)
    wait()
    assert module(X, X).tolist() == [0, 2, 4, 6]
    assert module.stats()["constants_copied"] is False  # it lies where it was read to


def test_a_file_that_is_replaced_is_another_one(large):
    module = aotc.load(large)
    manifest, segments = tiny.parts()
    write_bundle(large, {**manifest, "name": "other"}, segments)
    wait()
    assert module(X, X).tolist() == [0, 2, 4, 6]
    assert aotc.load(large).name == "other"
    large.unlink()
    wait()
    assert module.invoke("grow", X)[0].shape == (4,)


def test_a_file_is_looked_at_at_most_once_in_10_ms(large, monkeypatch):
    module = aotc.load(large)
    module(X, X)
    seen, now = [], [time.monotonic_ns()]
    monkeypatch.setattr("aotc.vmfb.memory.mapped_file.monotonic_ns", lambda: now[0])
    fake = SimpleNamespace(fstat=lambda n: seen.append(n) or os.fstat(n))
    monkeypatch.setattr("aotc.vmfb.memory.mapped_file.os", fake)
    for step in (FILE_CHECK_NANOSECONDS, 1, FILE_CHECK_NANOSECONDS - 2, 1, FILE_CHECK_NANOSECONDS):
        now[0] += step
        module(X, X)
    assert len(seen) == 3


TWO = """
import json, sys, time
import numpy as np
import aotc
module = aotc.load(sys.argv[1])
x = np.arange(4, dtype="f4")
print(module.invoke("grow", x)[0].tolist(), flush=True)
sys.stdin.readline()
try:
    print(module.invoke("grow", x)[0].tolist())
except aotc.BundleError as error:
    print(str(error).partition("\\n")[0])
"""


CHANGES = [(smaller, "overwritten"), (same_size, "overwritten"), (write_bundle, "[")]


@pytest.mark.parametrize(("change", "says"), CHANGES)
def test_another_process_is_told(large, change, says):
    command = [sys.executable, "-c", TWO, large]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        first = process.stdout.readline()
        if change is write_bundle:
            change(large, *tiny.parts())
        else:
            change(large)
        wait()
        out, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 0
    assert says in out
    assert says != "[" or json.loads(out) == json.loads(first)


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


@pytest.mark.parametrize("size", [0, EAGER_BYTES])
@pytest.mark.parametrize("damage", DAMAGES)
def test_external_weights_are_copied_or_compared(tmp_path, size, damage):
    from test_external_weights import grown, with_external

    path, weights = with_external(tmp_path), tmp_path / "w.safetensors"
    with_zeros(weights, size)
    module, copied = aotc.load(path), aotc.load(path, copy=True)
    want = grown(module)
    damage(weights)
    wait()
    assert grown(copied) == want
    if not size:
        assert grown(module) == want
        return
    with pytest.raises(BundleError, match=r"w\.safetensors: error: the file was overwritten"):
        grown(module)


def with_zeros(path, size):
    """Put a tensor of ``size`` bytes behind those of a file."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    last = len(data) - end
    header["more"] = {"dtype": "U8", "shape": [size], "data_offsets": [last, last + size]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:] + bytes(size))
