"""Data with right checksums from an untrusted writer: bounded memory, no fault of the system's loader, clear errors."""

import json
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from support import tiny

from aotc.vmfb import bundle
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.module import load
from aotc.vmfb.verify.elf import elf_problem
from aotc.vmfb.verify.unpack import unpack_msgpack
from aotc.vmfb.weights.tensors import read_tensors, write_tensors

pytestmark = pytest.mark.ir

MEMORY = """
import resource, sys
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    open_bundle(sys.argv[1])
except BundleError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024, str(error).replace(chr(10), " "))
"""


def with_manifest(packed):
    """Return a bundle whose manifest is ``packed``, with its checksum."""
    total = bundle._HEADER.size + bundle._align_offset(len(packed))
    header = bundle._HEADER.pack(bundle.MAGIC, bundle.VERSION, 0, len(packed), bundle.sha256_of(packed), total)
    return header + packed + bytes(total - bundle._HEADER.size - len(packed))


def listed(item, count):
    """Return msgpack of a list of ``count`` times the packed ``item``."""
    return b"\xdd" + count.to_bytes(4, "big") + item * count


@pytest.mark.parametrize("item", [b"\x80", b"\x81\x00\x00", b"\xde\x00\x00", b"\x90", b"\x91\x00", b"\xdc\x00\x00"])
def test_a_manifest_takes_memory_by_its_size(item, tmp_path):
    path = tmp_path / "bomb.vmfb"
    path.write_bytes(with_manifest(listed(item, 10_000_000 // len(item))))
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
    megabytes, said = done.stdout.split(maxsplit=1)
    assert "too many for its size" in said or "manifest is list" in said
    assert int(megabytes) < 320


def test_what_cannot_be_too_much_is_unpacked_without_counting():
    rows = [{"name": f"k{n}", "dims": [n, 2, 3], "digest": bytes(32)} for n in range(30_000)]
    assert unpack_msgpack(msgpack.packb(rows)) == rows
    assert unpack_msgpack(msgpack.packb([[n, 1, 2] for n in range(100_000)]))[-1] == [99_999, 1, 2]
    assert unpack_msgpack(msgpack.packb({"code": bytes(range(256)) * 4000}))["code"][:2] == b"\x00\x01"


def test_a_cut_library_is_not_given_to_the_systems_loader():
    """The loader itself would touch pages past the end of the file, which ends the process."""
    manifest, segments = tiny.parts()
    name, code = segments[1]
    assert elf_problem(memoryview(code)) == ""
    code = bytes(code)
    for size in (0, 3, 63, 64, 200, len(code) // 2):
        segments[1] = (name, code[:size])
        with pytest.raises(BundleError, match="is cut or damaged"):
            load(write_bundle(None, manifest, segments))
    for at, value in ((0x20, 1 << 60), (0x38, 0), (0x36, 9)):  # where program headers are, how many, how long
        changed = bytearray(code)
        changed[at : at + 2 if at > 0x30 else at + 8] = value.to_bytes(2 if at > 0x30 else 8, "little")
        assert elf_problem(memoryview(changed))


def safetensors(rows, body):
    text = json.dumps(rows).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    ("row", "body", "said"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, bytes(9), "longer than its header says: "),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, bytes(7), "truncated: "),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, bytes(8), r"tensor 'x' is F32\[3\], and has 8 bytes"),
        ({"dtype": "F32", "shape": [1 << 60, 1 << 60], "data_offsets": [0, 8]}, bytes(8), "and has 8 bytes"),
        ({"dtype": 3, "shape": [2], "data_offsets": [0, 8]}, bytes(8), "tensor 'x' is described by"),
    ],
)
def test_a_safetensors_file_that_contradicts_itself(tmp_path, row, body, said):
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors({"x": row}, body))
    with pytest.raises(BundleError, match=said):
        read_tensors(path)


def spans(*offsets):
    """A file of U8 tensors with these offsets."""
    rows = {f"t{n}": {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]} for n, (a, b) in enumerate(offsets)}
    return safetensors(rows, bytes(max(b for _, b in offsets)))


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([(0, 8), (4, 12)], "tensors 't0' and 't1' overlap: one ends at 8, the other begins at 4"),
        ([(4, 12), (0, 8)], "tensors 't1' and 't0' overlap"),
        ([(0, 8), (0, 8)], "overlap"),
        ([(0, 9), (1, 2), (8, 10)], "tensors 't0' and 't1' overlap"),
        ([(0, 9), (3, 3), (8, 10)], "tensors 't0' and 't2' overlap"),
        ([(0, 4), (4, 4), (4, 8), (2, 2), (64, 72)], ""),  # aotc aligns tensors
    ],
)
def test_tensors_that_overlap_are_refused(tmp_path, offsets, said):
    path = tmp_path / "w.safetensors"
    path.write_bytes(spans(*offsets))
    if not said:
        assert len(read_tensors(path)) == len(offsets)
        return
    with pytest.raises(BundleError, match=f"not a safetensors file: .*{said}"):
        read_tensors(path)


@pytest.mark.parametrize(
    "header",
    [
        r'{"a\ud800b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
        r'{"a": {"dtype": "\uDC00", "shape": [1], "data_offsets": [0, 1]}}',
        r'{"__metadata__": {"k": "\ud800 \udc00"}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}',
    ],
)
def test_halves_of_surrogate_pairs_are_refused_with_a_message_that_can_be_printed(tmp_path, header):
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"1")
    said = r"its header has U\+D[8C]00, half of a surrogate pair, in '.*\\ud[8c]00"
    with pytest.raises(BundleError, match=said) as caught:
        read_tensors(path)
    str(caught.value).encode("ascii")
    whole = '{"\\ud83d\\ude00": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'
    path.write_bytes(len(whole).to_bytes(8, "little") + whole.encode() + b"1")
    assert list(read_tensors(path)) == ["\U0001f600"]


def test_surrogates_in_the_bytes_of_a_header_are_refused(tmp_path):
    text = '{"\ud800": {}}'.encode(errors="surrogatepass")
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(BundleError, match="not a safetensors file: 'utf-8' codec") as caught:
        read_tensors(tmp_path / "w.safetensors")
    str(caught.value).encode("ascii")


def test_a_dtype_that_only_later_versions_know(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(safetensors({"x": {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]}}, bytes(8)))
    found = read_tensors(path)
    with pytest.raises(BundleError, match=r"(?s)tensor 'x' has an unknown dtype.*F3.*one of BOOL"):
        found["x"]
    assert found.problems({"x": ("f32", [2])}) == ["x is F3[2], expected f32[2]"]


def test_arrays_that_cannot_be_written(tmp_path):
    with pytest.raises(BundleError, match=r"(?s)nowhere.*cannot write the file: No such file.*16 free bytes"):
        write_tensors(tmp_path / "nowhere" / "w", {"x": np.zeros(4, np.float32)})
    with pytest.raises(BundleError, match="No space left on device"):
        write_tensors("/dev/full", {"x": np.zeros(4, np.float32)})

