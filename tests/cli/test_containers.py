"""Files of several arrays that ``aotc run`` reads and writes, each in the form that its name says."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from support import tiny

from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import CallError
from aotc_cli import main as cli_main
from aotc_cli.shared.array_files import arrays_by_name, read_arrays, write_arrays

pytestmark = pytest.mark.ir


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the tiny bundle in this process with ``x = 1 2 3 4`` twice; return (exit code, stdout, stderr)."""
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())

    def call(*args):
        inputs = [] if any(a.startswith("--input") for a in args) else ["--input=4xf32=1,2,3,4"] * 2
        monkeypatch.setattr(sys, "argv", ["aotc", "run", str(tmp_path / "tiny.vmfb"), *inputs, *args])
        with pytest.raises(SystemExit) as stopped:
            cli_main.main()
        text = capsys.readouterr()
        return stopped.value.code or 0, text.out, text.err

    return call


def test_the_suffix_selects_the_file_format(run, tmp_path):
    for suffix in (".npz", ".json", ".bin", ".safetensors", ".npy"):
        assert run(f"--output=@{tmp_path}/y{suffix}") == (0, "", "")
    want = np.float32([2, 4, 6, 8])
    (name,) = (held := np.load(tmp_path / "y.npz")).files
    np.testing.assert_array_equal(held[name], want)
    entry = json.loads((tmp_path / "y.json").read_text())[name]
    assert entry == {"dtype": "f32", "shape": [4], "data": [2.0, 4.0, 6.0, 8.0]}
    assert (tmp_path / "y.bin").read_bytes() == want.tobytes()
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), want)
    safetensors = pytest.importorskip("safetensors.numpy")
    np.testing.assert_array_equal(safetensors.load_file(tmp_path / "y.safetensors")[name], want)


@pytest.mark.parametrize("suffix", [".npz", ".json", ".bin", ".safetensors"])
def test_written_arrays_are_read_back(run, tmp_path, suffix):
    assert run(f"--output=@{tmp_path}/y{suffix}")[0] == 0
    code, out, err = run(f"--input=@{tmp_path}/y{suffix}", "--input=4xf32=1")
    assert (code, out, err) == (0, "result[0]: 4xf32=3 5 7 9\n", "")


@pytest.mark.parametrize(
    ("output", "part"),
    [("@y.txt", ".txt is not a format"), ("@y.pt", "expected"), ("+y.npz", "only a .npy can be appended to")],
)
def test_unknown_formats_are_refused_before_the_run(run, tmp_path, monkeypatch, output, part):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("aotc.vmfb.module.LoadedModule.invoke", lambda *args, **kwargs: pytest.fail("it ran"))
    code, _, err = run(f"--output={output}")
    assert code == 1
    assert part in err
    assert not (tmp_path / output[1:]).exists()


ARRAYS = {
    "a['w']": np.array([[1.5, -0.0], [np.inf, np.nan]], np.float32),
    "b": np.array([1 + 2j, complex(3, -np.inf)], np.complex64),
    "c": np.array([-(2**63), 2**63 - 1], np.int64),
    "d": np.array([2**64 - 1], np.uint64),
    "e": np.array([True, False]),
    "f": np.array(3.25, ml_dtypes.bfloat16),
    "g": np.zeros((0, 3), np.float64),
    "h": np.array([1.5, -2], ml_dtypes.float8_e4m3fn),
}


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_every_dtype_round_trips_through_each_format(tmp_path, suffix):
    room = [{"name": n, "dtype": from_numpy(a.dtype), "dims": list(a.shape)} for n, a in ARRAYS.items()]
    write_arrays(f"{tmp_path}/y{suffix}", ARRAYS)
    found = read_arrays(f"{tmp_path}/y{suffix}", room, "--input")
    for got, want in zip(found, ARRAYS.values(), strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        wide = complex if want.dtype.kind == "c" else want.dtype if want.dtype.kind in "iub" else float
        np.testing.assert_array_equal(got.astype(wide), want.astype(wide))


def test_arrays_match_arguments_by_name_before_order():
    a, b, c = (np.zeros(n) for n in (1, 2, 3))
    room = [{"name": "x"}, {"name": "y"}]
    assert [v.size for v in arrays_by_name({"y": b, "x": a}, room)] == [1, 2]
    assert [v.size for v in arrays_by_name({"u": c, "x": a}, room)] == [3, 1]


@pytest.mark.parametrize(
    ("name", "data", "part"),
    [
        ("x.json", b"{", "Expecting"),
        ("x.json", b'{"a": {"dtype": "f99", "data": [1]}}', "dtype of 'a' is 'f99'"),
        ("x.json", b'{"a": [[1, 2]]}', "'a' has no dtype and data"),
        ("x.safetensors", b"12", "not the length of a header"),
        ("x.safetensors", (2**40).to_bytes(8, "little") + b"{}", "not the length of a header"),
        ("x.bin", b"123", "3 bytes, expected 16"),
    ],
)
def test_a_damaged_file_is_an_error(tmp_path, name, data, part):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CallError, match=part):
        read_arrays(str(tmp_path / name), [{"name": "x", "dtype": "f32", "dims": [4]}], "--input")
