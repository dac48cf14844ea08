"""Constants that a bundle has compressed: expanded at load, and refused if they are damaged. Without the compiler."""

import tracemalloc
import zlib

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.module import load
from aotc.vmfb.verify.check_bundle import check_bundle
from aotc.vmfb.weights import differences as codec
from aotc.vmfb.weights.differences import decompress_differences, expand_differences, word_differences

pytestmark = pytest.mark.ir

WEIGHT = np.full(16, 3, np.float32)
STREAM = zlib.compress(word_differences(WEIGHT.view(np.uint8), 4))
RAW = bytes(64)
ROWS = [[0, 64, 0, len(STREAM), 4, 1], [64, 64, len(STREAM), 64, 0, 0]]


@pytest.mark.parametrize("word", codec.WORDS)
@pytest.mark.parametrize("row_words", [128, 4])
def test_differences_are_undone(word, row_words, monkeypatch):
    """For all distances, also beyond the end; blocks and pieces of any size."""
    rng = np.random.default_rng(word)
    monkeypatch.setattr(codec, "ROW_WORDS", row_words)
    for count in (0, 1, 2, 7, 40, 64):
        for distance in (0, 1, 2, 5, 39, 40, 63, 64, 65, 1 << 60):
            monkeypatch.setattr(codec, "EXPANDED_BYTES", int(rng.integers(1, 80)))
            monkeypatch.setattr(codec, "READ_BYTES", int(rng.integers(1, 30)))
            elements = rng.integers(0, 256, count * word).astype(np.uint8)
            into = np.zeros(elements.size, np.uint8)
            expand_differences(zlib.compress(word_differences(elements, word, distance)), word, distance, into)
            assert into.tobytes() == elements.tobytes()


def test_streams_that_are_damaged():
    packed = zlib.compress(bytes(4096))
    for stream, size in (
        (packed[:-1], 4096), (packed[:9], 4096), (packed + b"x", 4096), (packed, 4095), (packed, 4092), (packed, 4100),
        (b"", 4096), (b"", 0), (b"x", 0), (packed[:12] + b"\0" + packed[13:], 4096), (packed, -4),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            decompress_differences(stream, 4, size)
    for word, distance in ((0, 1), (3, 1), (16, 1), (4, -1)):
        with pytest.raises(ValueError, match="words of"):
            expand_differences(packed, word, distance, np.zeros(4096, np.uint8))


def bundle(change=lambda entry: None, stored=STREAM + RAW):
    """Return the tiny bundle, its constants compressed, with a change of their entry."""
    manifest, segments = tiny.parts()
    entry = {"segment": 2, "size": 128, "rows": [list(row) for row in ROWS]}
    change(entry)
    segments[2] = ("constants", stored)
    manifest["variants"][0]["constants"] = {"compressed": entry}
    return write_bundle(None, manifest, segments)


def grown(module):
    return module.invoke("grow", np.arange(4, dtype=np.float32))[0].tolist()


def test_constants_are_expanded():
    module = load(bundle(), verify=True)
    assert grown(module) == [0, 6, 12, 18]
    assert module.stats()["constants_bytes"] == 128
    assert module.stats()["constants_copied"] is True
    check_bundle(bundle())


def row(number, place, value):
    return lambda entry: entry["rows"][number].__setitem__(place, value)


WRONG = {
    "a row of five numbers": (lambda e: e["rows"][0].pop(), "are 5 numbers, expected 6"),
    "a row beyond the constants": (lambda e: e.update(size=127), "lie outside of 64 to 127"),
    "rows that overlap": (row(1, 0, 60), "lie outside of 64 to 128"),
    "a row beyond the segment": (row(1, 2, len(STREAM) + 1), "of the .* bytes that are stored"),
    "a stream beyond the segment": (row(0, 3, 1 << 62), "of the .* bytes that are stored"),
    "stored bytes that two rows name": (row(1, 2, 0), "expected to begin at"),
    "stored bytes that no row names": (lambda e: e["rows"].pop(), "do not fill their segment"),
    "bytes as they are, and fewer": (row(1, 3, 63), "are 63 bytes as they are, expected 64"),
    "bytes as they are, with a distance": (row(1, 5, 1), "are 64 bytes as they are"),
    "words of three bytes": (row(0, 4, 3), "have words of 3 bytes"),
    "half a word": (row(0, 1, 62), "have words of 4 bytes"),
    "a growth that no stream has": (lambda e: e.update(size=1 << 40, rows=[[0, 1 << 40, 0, 64, 4, 1]]), "no stream"),
    "more than an address space": (lambda e: e.update(size=1 << 50), "bytes of constants"),
    "a negative number": (row(0, 5, -1), "breaks the schema"),
    "no such segment": (lambda e: e.update(segment=99), "does not exist"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_entries_are_refused(name):
    change, message = WRONG[name]
    for refuse in (load, check_bundle):
        with pytest.raises(BundleError, match=message):
            refuse(bundle(change))


def test_damaged_streams_are_refused():
    """Each byte of a stream, changed and with right checksums: its own checksum differs, or the stream is no stream."""
    for at in range(len(STREAM)):
        stored = bytearray(STREAM + RAW)
        stored[at] ^= 0x55
        with pytest.raises(BundleError, match="the constants at 0 are damaged"):
            load(bundle(stored=bytes(stored)))


def test_a_loader_from_before_compressed_constants_refuses_them():
    """It passes over the key, so the constants have no bytes for it, and a kernel's extents do not fit."""
    opened = open_bundle(bundle())
    manifest = {k: v for k, v in opened.manifest.items() if k != "segments"}
    manifest["variants"][0]["constants"] = {"of_a_later_version": {}}
    segments = [(row["name"], bytes(opened.segment(n))) for n, row in enumerate(opened.manifest["segments"])]
    with pytest.raises(BundleError, match="of slot 3, which has 0"):
        grown(load(write_bundle(None, manifest, segments)))


def test_a_stream_that_expands_to_more_than_it_says_takes_no_memory():
    bomb = zlib.compress(bytes(64 << 20), 9)
    change = lambda entry: entry.update(size=1 << 20, rows=[[0, 1 << 20, 0, len(bomb), 1, 0]])
    data = bundle(change, bomb)
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="more than 1,048,576 bytes"):
            load(data)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
