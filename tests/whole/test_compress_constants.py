"""Which constants a bundle has compressed, and what remains as it is."""

import numpy as np
import pytest
from typer.testing import CliRunner

import aotc
from aotc.driver import compress_constants as compression
from aotc.driver.compress_constants import compress_constants
from aotc.ir.program.ir import Constants
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.weights.constants import load_constants
from aotc_cli.main import app

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
NOISE = RNG.standard_normal((128, 128)).astype("float32")
IDENTITY = np.eye(128, dtype="float32")
INDEX = np.subtract.outer(np.arange(300), np.arange(300))
NUMBERS = RNG.integers(0, 128, 3000)
VALUES = RNG.standard_normal(601).astype("float32")

# Arrays, and the distance of words whose differences are stored, where others would be much larger.
COMPRESSED = {
    "identity": (np.eye(300), None), "triangle": (np.tri(300) > 0, None), "numbers": (np.arange(1 << 16), 1),
    "rows": (np.tile(NOISE.reshape(1, -1), (40, 1)), 128 * 128), "bias of distances": (VALUES[INDEX + 300], 301),
    "columns": (np.repeat(NOISE.reshape(-1, 1), 30, 1), None), "complex": (np.arange(5000) * (1 + 2j), 2),
    "NaN and zeros of both signs": (np.where(INDEX > 0, np.nan, -0.0), None), "one-hot": (IDENTITY[NUMBERS], None),
}  # fmt: skip


def blob(*arrays, apart=False):
    constants = Constants(guard_gaps=apart)
    for n, a in enumerate(arrays):
        constants.add(np.ascontiguousarray(a), f"a{n}")
    return constants


def rows_of(*arrays):
    """Return the word and the distance of each stored row; words of 0 bytes are bytes as they are."""
    found = compress_constants(blob(*arrays))
    return found and [tuple(row[4:]) for row in found.rows]


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressible_constants_are_compressed(name):
    array, distance = COMPRESSED[name]
    found = compress_constants(blob(array))
    ((offset, size, at, length, word, found_distance),) = found.rows
    assert (offset, size, at) == (0, array.nbytes, 0)
    assert length == sum(part.nbytes for part in found.parts) < array.nbytes / compression.WORTH_RATIO
    assert word == min(array.itemsize, 8)
    assert distance in (None, found_distance)


@pytest.mark.parametrize(
    "array",
    [
        NOISE, NOISE * (RNG.random(NOISE.shape) < 0.1), RNG.integers(-9, 9, (300, 300)).astype("int8"),
        RNG.random((300, 300)) < 0.5, np.concatenate([np.zeros((128, 128), "f"), NOISE]), np.zeros((0, 5)),
        np.eye(64, dtype="float32"),
    ],
    ids=["weights", "few weights", "bytes", "bits", "half of it zeros", "empty", "small"],
)  # fmt: skip
def test_incompressible_constants_are_stored_uncompressed(array):
    assert compress_constants(blob(array)) is None


def test_compression_ends_early_if_the_samples_are_misleading():
    """Zeros where samples are taken, noise elsewhere: the compression ends early."""
    array = RNG.integers(0, 1 << 32, 1 << 21, np.uint32)
    array[: 1 << 13] = array[1 << 20 : (1 << 20) + (1 << 13)] = 0
    assert compression._trial_compression_ratio(array, 0) < 0.1
    assert compress_constants(blob(array)) is None


def test_small_arrays_are_not_compressed():
    limit = compression.SMALL_BYTES // 4
    assert rows_of(np.arange(limit, dtype="int32")) is None
    assert rows_of(np.arange(limit + 1, dtype="int32")) == [(4, 1)]


def test_adjacent_uncompressed_constants_share_a_row():
    assert rows_of(NOISE, NOISE + 1, IDENTITY, NOISE[:3], NOISE[:5]) == [(0, 0), (4, 0), (0, 0)]


def test_large_weights_stay_mapped_if_compression_saves_little(monkeypatch):
    """Constants with compressed ones are copied; more than 4 MB are mapped otherwise."""
    assert rows_of(IDENTITY, *(NOISE + n for n in range(30))) is not None
    monkeypatch.setattr(compression, "EAGER_BYTES", 1 << 18)
    assert rows_of(IDENTITY, *(NOISE + n for n in range(9))) is not None
    assert rows_of(IDENTITY, *(NOISE + n for n in range(11))) is None


@pytest.mark.parametrize("apart", [False, True])
def test_decompression_restores_every_byte(apart):
    odd = np.arange(9001, dtype="uint8")
    constants = blob(odd, IDENTITY, NOISE[:, :33], odd[:7], np.tri(200) > 0, VALUES[INDEX + 300], NOISE, apart=apart)
    found = compress_constants(constants)

    class Opened:
        where = "test"

        def segment(self, number):
            return memoryview(b"".join(found.parts))

    memory = load_constants(Opened(), {"compressed": found.entry(0)})
    assert memory.address % 64 == 0
    whole = memory.owner[memory.address - memory.owner.ctypes.data :][: memory.size]
    want = b"".join(constants.parts())
    assert memory.size == len(want)
    assert whole.tobytes() == want


def test_packed_weights_of_a_compressed_bundle_match(tmp_path):
    """Panels of a matrix that is packed when it is compiled; the command line names both sizes."""
    data = aotc.compile(lambda x: x @ IDENTITY[::-1] + x @ NOISE, NOISE[:5], source=False)
    entry = open_bundle(data).manifest["variants"][0]["constants"]["compressed"]
    assert len(entry["rows"]) == 2
    np.testing.assert_allclose(aotc.load(data)(NOISE[:5]), NOISE[:5, ::-1] + NOISE[:5] @ NOISE, rtol=1e-4, atol=1e-4)
    data.save(tmp_path / "m.vmfb")
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "m.vmfb")]).output
    assert "of which the bundle has" in " ".join(said.split())
