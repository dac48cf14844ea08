"""The bundle format: round trips, and every way in which a file can be wrong."""

import errno
import os
import re
from functools import partial
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny

from aotc.vmfb import bundle as fmt
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.host.digests import sha256_of
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir


def empty(**more):
    """A manifest without functions."""
    return {
        "format": 1,
        "producer": "tests",
        "name": "n",
        "functions": {},
        "symbols": [],
        "variants": [],
        **more,
    }


def small():
    """A bundle of a few hundred bytes with three segments, two of them equal."""
    return write_bundle(None, empty(), [("a", b"abc"), ("b", b"x" * 70), ("c", b"abc")])


def forged(manifest, payload=b""):
    """A bundle whose checksums are right, whatever the manifest says."""
    packed = msgpack.packb(manifest)
    body = packed + bytes(-len(packed) % 64) + payload
    header = fmt._HEADER.pack(fmt.MAGIC, 1, 0, len(packed), sha256_of(packed), 64 + len(body))
    return header + body


def test_round_trip():
    found = open_bundle(small())
    assert [bytes(found.segment(i)) for i in range(3)] == [b"abc", b"x" * 70, b"abc"]
    assert found.manifest["segments"][0]["offset"] == found.manifest["segments"][2]["offset"]
    assert all(row["offset"] % 64 == 0 for row in found.manifest["segments"])


def test_equal_input_gives_equal_bytes(tmp_path):
    path = tmp_path / "n.vmfb"
    write_bundle(path, empty(), [("a", b"abc"), ("b", b"x" * 70), ("c", np.frombuffer(b"abc", np.uint8))])
    assert path.read_bytes() == small() == small()
    assert bytes(open_bundle(path).segment(1)) == b"x" * 70


def test_every_flipped_byte_is_found():
    good = small()
    for place in range(len(good)):
        for flip in (0x01, 0x80, 0xFF):
            bad = bytearray(good)
            bad[place] ^= flip
            with pytest.raises(BundleError):
                open_bundle(bad)


def test_every_truncation_is_found(tmp_path):
    good = small()
    path = tmp_path / "cut.vmfb"
    for length in range(len(good)):
        with pytest.raises(BundleError):
            open_bundle(good[:length])
        if length % 17 == 0:
            path.write_bytes(good[:length])
            with pytest.raises(BundleError):
                open_bundle(path)
    with pytest.raises(BundleError, match="longer than its header says"):
        open_bundle(good + b"\0" * 64)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(BundleError):
        open_bundle(data)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 1 << 40) | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*empty(), "segments"]), _JUNK)
def test_a_manifest_with_junk_loads_or_is_refused(key, junk):
    with pytest.raises(BundleError):  # the whole has no variants, so nothing can load
        load(forged({**empty(), "segments": [], key: junk}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b"\x7fELF" + b[4:], "not an aotc bundle"),
        (lambda b: b[:8] + b"\x07" + b[9:], "version 7"),
        (lambda b: b[:12] + b"\x02" + b[13:], "unknown flags"),
        (lambda b: b[:12] + b"\x01" + b[13:], "the signature is damaged"),
        (lambda b: b[:-1], "truncated"),
        (lambda b: b[:70] + bytes([b[70] ^ 4]) + b[71:], "manifest is damaged"),
        (lambda b: b[:-128] + bytes([b[-128] ^ 4]) + b[-127:], "is damaged"),
        (lambda b: b"", "not an aotc bundle"),
    ],
)
def test_each_fault_has_its_message(change, message):
    with pytest.raises(BundleError, match=message):
        open_bundle(change(small()))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(32, 4)], "not aligned"),
        ([(0, 65), (64, 4)], "overlap"),
        ([(128, 4)], "past the end"),
        ([], "does not end with its last segment"),
    ],
)
def test_segment_tables_that_lie(rows, message):
    table = [{"name": "s", "offset": o, "size": n, "sha256": sha256_of(bytes(n))} for o, n in rows]
    with pytest.raises(BundleError, match=message):
        open_bundle(forged({**empty(), "segments": table}, bytes(128)))


def test_another_manifest_format_is_named():
    with pytest.raises(BundleError, match="another manifest format"):
        open_bundle(forged({**empty(format=9), "segments": []}))


def test_the_writer_checks_the_manifest():
    with pytest.raises(BundleError, match="manifest has no 'name'"):
        write_bundle(None, {k: v for k, v in empty().items() if k != "name"}, [])


def test_missing_file(tmp_path):
    with pytest.raises(BundleError, match="No such file"):
        open_bundle(tmp_path / "none.vmfb")


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "n.vmfb"
    path.write_bytes(b"old")

    def fail(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fmt.os, "fsync", fail)
    with pytest.raises(BundleError, match="No space left"):
        write_bundle(path, empty(), [])
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["n.vmfb"]


def test_large_segments_are_verified_on_request(tmp_path):
    manifest, segments = tiny.parts(weights=tiny.constants(fmt.EAGER_BYTES + 64).tobytes())
    path = tmp_path / "big.vmfb"
    write_bundle(path, manifest, segments)
    data = bytearray(path.read_bytes())
    table = open_bundle(data).manifest["segments"]
    payload = len(data) - fmt.segment_table_bytes(table)
    data[payload + table[2]["offset"] + 1000] ^= 1
    path.write_bytes(data)
    load(path)
    with pytest.raises(BundleError, match=r"segment 2 \(constants\) is damaged"):
        load(path, verify=True)


def test_constants_are_used_where_they_are_mapped(tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(tiny.bundle())
    assert load(path).stats()["constants_copied"] is False


# ---------------------------------------------------------------- bundles that are whole but cannot run here


def changed(**variant):
    """The tiny bundle with other entries in its variant."""
    manifest, segments = tiny.parts()
    manifest["variants"][0].update(variant)
    return write_bundle(None, manifest, segments)


def test_wrong_cpu_lists_what_is_missing_and_offered():
    with pytest.raises(BundleError, match="cpu:any: this CPU lacks avx9, sse99"):
        load(changed(features=["sse99", "avx9"]))


def test_a_device_that_was_not_compiled_for():
    text = r"no code for cuda\n *found: *cpu:any\n *try: leave out .*--target=cuda:sm_90,cpu"
    with pytest.raises(BundleError, match=text):
        load(tiny.bundle(), devices="cuda")
    with pytest.raises(BundleError, match="unknown device 'tpu'"):
        load(tiny.bundle(), devices="tpu:0")


def test_devices_by_number():
    assert load(tiny.bundle(), devices="cpu:0").stats()["target"] == "cpu:any"
    assert load(tiny.bundle(), devices=["cuda:1", "cpu"]).stats()["target"] == "cpu:any"
    with pytest.raises(BundleError, match="device 'cpu:x' has no number"):
        load(tiny.bundle(), devices="cpu:x")


def test_a_kind_of_device_that_this_version_does_not_know():
    with pytest.raises(BundleError, match="no runtime for 'npu'"):
        load(changed(kind="npu"))


def test_the_best_variant_wins():
    manifest, segments = tiny.parts()
    plain = manifest["variants"][0]
    from aotc.vmfb.host.machine import cpu_features

    feature = min(cpu_features())
    better = {**plain, "target": "cpu:better", "features": [feature]}
    tiny.seal(better, segments)
    manifest["variants"] = [better, plain, {**plain, "target": "cpu:no", "features": ["sse99", feature]}]
    assert load(write_bundle(None, manifest, segments)).stats()["target"] == "cpu:better"


def test_a_library_without_its_table():
    manifest, segments = tiny.parts()
    segments[1] = ("library", tiny.shared_object("int other;"))
    with pytest.raises(BundleError, match="exports no 'aotc_kernels'"):
        load(write_bundle(None, manifest, segments))


def test_a_command_buffer_that_breaks_the_rules():
    for words in (b"1234567", np.array([7, 2], "<i8").tobytes()):
        manifest, segments = tiny.parts()
        segments[3] = ("commands0", words)
        with pytest.raises(BundleError, match="command buffer 0 is invalid"):
            load(write_bundle(None, manifest, segments))


@pytest.mark.parametrize(
    "tree", [{"kind": "bush"}, {"kind": "dict", "children": [{}]}, {"kind": "list", "children": [3]}]
)
def test_a_pytree_that_is_none(tree):
    manifest, segments = tiny.parts()
    manifest["functions"]["main"]["out_tree"] = tree
    with pytest.raises(BundleError, match="out_tree of function 'main'"):
        load(write_bundle(None, manifest, segments))


def test_a_library_that_is_none():
    manifest, segments = tiny.parts()
    segments[1] = ("library", b"not a library")
    with pytest.raises(BundleError, match="the kernel library is cut or damaged"):
        load(write_bundle(None, manifest, segments))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("int aotc_pool_bytes;", "executor exports no 'aotc_executor_version'"),
        (tiny.EXECUTOR.replace("return 6;", "return 99;", 1), "executor has another version"),
    ],
)
def test_an_executor_that_does_not_fit(source, message, monkeypatch):
    from aotc.vmfb.devices.cpu import native

    monkeypatch.setattr(native, "_PROCESS", native._Process())
    manifest, segments = tiny.parts()
    segments[0] = ("executor", tiny.shared_object(source))
    with pytest.raises(BundleError, match=message):
        load(write_bundle(None, manifest, segments))


def test_each_version_has_an_executor_of_its_own(monkeypatch):
    from aotc.vmfb.devices.cpu import native

    monkeypatch.setattr(native, "_PROCESS", native._Process())
    manifest, segments = tiny.parts()
    (variant,) = manifest["variants"]
    variant["executor_version"] = 2
    tiny.seal(variant, segments)
    segments[0] = ("executor", tiny.shared_object(tiny.EXECUTOR.replace("return 6;", "return 2;", 1)))
    modules = [load(data, threads=1) for data in (tiny.bundle(), write_bundle(None, manifest, segments))]
    x = np.ones(4, np.float32)
    assert [m(x, x).tolist() for m in modules] == [[2] * 4] * 2
    assert set(native._PROCESS.executors) == {(2, b""), (6, b"")}
    assert modules[0]._executable._executor is not modules[1]._executable._executor


@pytest.mark.parametrize(("key", "known"), [("commands_version", "1, 2"), ("executor_version", "2, 3, 4, 5, 6")])
def test_a_version_that_is_not_known(key, known):
    manifest, segments = tiny.parts()
    manifest["variants"][0][key] = 99
    with pytest.raises(BundleError, match=f"{key.replace('_', ' ')} is 99, this aotc runs {known}"):
        load(write_bundle(None, manifest, segments))


# ---------------------------------------------------------------- the page about the format


def test_the_example_of_the_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "bundle.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {"executor": tiny.shared_object(tiny.EXECUTOR), "sealed": partial(tiny.sealed, tiny.KERNELS)}
    exec(code, names)
    x = np.arange(5, dtype=np.float32)
    assert load(names["data"])(x, x).tolist() == [0, 2, 4, 6, 8]
    assert load(names["data"])(b=x, a=x).tolist() == [0, 2, 4, 6, 8]


def test_an_executor_that_is_known_is_compared_all_the_same():
    """Not by its sha256, which is damaged with it: by its bytes."""
    load(tiny.bundle(), threads=1)
    data = bytearray(tiny.bundle())
    row = open_bundle(bytes(data)).manifest["segments"][0]
    at = data.index(tiny.shared_object(tiny.EXECUTOR)[:256])
    data[at + row["size"] // 2] ^= 1
    with pytest.raises(BundleError, match=r"segment 0 \(executor\) is damaged"):
        load(bytes(data), threads=1)
