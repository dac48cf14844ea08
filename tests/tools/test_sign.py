"""Signed bundles: what is refused, and whose executor runs."""

import ctypes

import numpy as np
import pytest
from support import tiny
from typer.testing import CliRunner

import aotc
from aotc.tools.sign import new_key, sign_bundle
from aotc.vmfb.abi import EXECUTOR_VERSION
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.describe import describe_bundle
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.errors import BundleError
from aotc_cli.main import app

pytest.importorskip("cryptography")
pytestmark = pytest.mark.ir

X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Paths of two private keys; the public ones lie beside them."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("me", "other"):
        assert new_key(str(folder / name)) == str(folder / f"{name}.pub")
    return folder


@pytest.fixture
def path(tmp_path, keys):
    """The tiny bundle, signed."""
    file = tmp_path / "t.vmfb"
    file.write_bytes(tiny.bundle())
    sign_bundle(str(file), str(keys / "me"))
    return file


def test_a_bundle_signed_by_a_trusted_key_runs(path, keys):
    public = keys / "me.pub"
    for key in (public, str(public), public.read_bytes()):
        assert aotc.load(path, trusted_keys=[key])(X, X).tolist() == [0, 2, 4, 6]
    assert aotc.load(path)(X, X).tolist() == [0, 2, 4, 6]
    assert aotc.load(path.read_bytes(), trusted_keys=[keys / "other.pub", public]).name == "tiny"


def test_a_trusted_key_may_be_hexadecimal_digits(path, keys):
    from aotc.vmfb.bundle import open_bundle

    key = open_bundle(path).signature[0].hex()
    assert aotc.load(path, trusted_keys=[key]).name == "tiny"


def test_signing_again_replaces_the_signature(path, keys, tmp_path):
    sign_bundle(str(path), str(keys / "other"), str(tmp_path / "u.vmfb"))
    assert (tmp_path / "u.vmfb").stat().st_size == path.stat().st_size
    aotc.load(tmp_path / "u.vmfb", trusted_keys=[keys / "other.pub"])
    with pytest.raises(BundleError, match="not trusted"):
        aotc.load(tmp_path / "u.vmfb", trusted_keys=[keys / "me.pub"])


def test_an_unsigned_bundle_is_refused(keys):
    with pytest.raises(BundleError, match="not signed"):
        aotc.load(tiny.bundle(), trusted_keys=[keys / "me.pub"])


def test_every_changed_byte_of_a_signed_bundle_is_refused(path, keys):
    data = path.read_bytes()
    for at in [*range(64), *range(64, len(data), 97), *range(len(data) - 128, len(data))]:
        broken = bytearray(data)
        broken[at] ^= 1
        with pytest.raises(BundleError):
            aotc.load(broken, trusted_keys=[keys / "me.pub"])
    for end in (len(data) - 1, len(data) - 128, 200, 64):
        with pytest.raises(BundleError):
            aotc.load(data[:end], trusted_keys=[keys / "me.pub"])


def test_the_signature_of_another_bundle_is_refused(path, keys):
    manifest, segments = tiny.parts()
    other = bytearray(write_bundle(None, {**manifest, "name": "evil"}, segments))
    data = path.read_bytes()
    other[12] = 1  # the flag
    other[56:64] = (len(other) + 128).to_bytes(8, "little")
    with pytest.raises(BundleError, match="signature is wrong"):
        aotc.load(bytes(other) + data[-128:], trusted_keys=[keys / "me.pub"])


@pytest.mark.parametrize("trusted", [[], "me", [b"no key"], ["nothing.pub"], [None], ["0" * 63]])
def test_invalid_trusted_keys_are_refused(trusted):
    with pytest.raises(BundleError):
        aotc.load(tiny.bundle(), trusted_keys=trusted)


class TestWrongKeys:
    """The message names the mistake, and the place is the file."""

    def refused(self, key):
        with pytest.raises(BundleError) as caught:
            aotc.load(tiny.bundle(), trusted_keys=[key])
        text = str(caught.value)
        assert "Errno" not in text
        return text

    def test_a_private_key_names_its_public_key(self, keys):
        text = self.refused(str(keys / "me"))
        assert text.startswith(f"{keys / 'me'}: error: this is a private key")
        assert f"its public key: {keys / 'me.pub'}" in text
        assert "private key" in self.refused((keys / "me").read_bytes())

    def test_a_missing_file(self, keys):
        text = self.refused(str(keys / "none.pub"))
        assert text.startswith(f"{keys / 'none.pub'}: error: there is no such file")

    @pytest.mark.parametrize("digits", ["abcd", "0" * 63, "0" * 66])
    def test_digits_of_another_length(self, digits):
        text = self.refused(digits)
        assert text.startswith(f"{digits}: error: wrong length of a public key")
        assert f"{len(digits)} digits" in text
        assert "64 hexadecimal digits" in text

    def test_a_file_without_a_key(self, tmp_path):
        (tmp_path / "x.pub").write_text("hello")
        text = self.refused(tmp_path / "x.pub")
        assert text.startswith(f"{tmp_path / 'x.pub'}: error: cannot read the public key")
        assert "the .pub file" in text

    def test_a_public_key_does_not_sign(self, path, keys):
        with pytest.raises(BundleError, match="this is a public key, and a private key signs") as caught:
            sign_bundle(str(path), str(keys / "me.pub"))
        assert f"the private key: {keys / 'me'}" in str(caught.value)
        with pytest.raises(BundleError, match="there is no such file"):
            sign_bundle(str(path), str(keys / "none"))


def test_an_executor_of_another_bundle_never_serves_a_trusted_one(path, keys, monkeypatch):
    """The evil one is loaded first: its executor counts its runs."""
    monkeypatch.setattr(native, "_PROCESS", native._Process())
    counted = tiny.EXECUTOR.replace("I *code = (I *)call[8];", "I *code = (I *)call[8]; runs++;").replace(
        "typedef int64_t I;", "typedef int64_t I; I runs;", 1
    )
    manifest, segments = tiny.parts()
    segments[0] = ("executor", tiny.shared_object(counted))
    evil = aotc.load(write_bundle(None, manifest, segments), threads=1)
    evil(X, X)
    runs = ctypes.c_int64.in_dll(native._PROCESS.executors[EXECUTOR_VERSION, b""].library.library, "runs")
    assert runs.value == 1
    aotc.load(tiny.bundle(), threads=1)(X, X)
    assert runs.value == 2, "an unsigned bundle shares the executor of the first"
    for _ in range(2):
        trusted = aotc.load(path, trusted_keys=[keys / "me.pub"], threads=1)
        assert trusted(X, X).tolist() == [0, 2, 4, 6]
    assert runs.value == 2
    assert len(native._PROCESS.executors) == 2


def test_new_key_does_not_overwrite_a_key(keys):
    with pytest.raises(BundleError, match="a key is not replaced"):
        new_key(str(keys / "me"))
    assert (keys / "me").stat().st_mode & 0o077 == 0


def test_inspect_shows_the_signing_key(path, keys):
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    public = (keys / "me.pub").read_bytes()
    facts = describe_bundle(open_bundle(str(path)), path.stat().st_size)
    key = load_pem_public_key(public).public_bytes_raw()
    assert facts["signed_by"] == key.hex()
    assert f"signed with {key.hex()}" in CliRunner().invoke(app, ["inspect", str(path)]).output
    path.write_bytes(tiny.bundle())
    assert describe_bundle(open_bundle(str(path)), path.stat().st_size)["signed_by"] is None
    assert "signed with" not in CliRunner().invoke(app, ["inspect", str(path)]).output
