"""Bundles whose code is not trusted: it never runs, the source does."""

import os
import subprocess
import sys
import zlib
from dataclasses import fields
from pathlib import Path

import msgpack
import numpy as np
import pytest
from support import tiny
from support.small_models import array

import aotc
from aotc import recompile
from aotc.options import OF_THE_RUN, Options
from aotc.source import reader_process
from aotc.source.record import OUTSIDE_RECORD, RECORDED
from aotc.vmfb import device
from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.devices.cpu import native

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
W, X = array(64, 200), array(16, 64, seed=1)
EVIL = r"""
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void run(void) { FILE *f = fopen(getenv("AOTC_EVIL"), "w"); if (f) fclose(f); }
"""
LOAD = "import sys, aotc; aotc.load(sys.argv[1], untrusted=sys.argv[2] == 'untrusted')"


def model(x):
    return x @ W


@pytest.fixture(scope="module")
def evil():
    """A bundle with a sound source, whose libraries write a file when they are loaded."""
    opened = open_bundle(aotc.compile(model, X))
    rows = opened.manifest["segments"]
    code = tiny.shared_object(EVIL)
    segments = [
        (row["name"], code if row["name"].endswith(".so") else bytes(opened.segment(n))) for n, row in enumerate(rows)
    ]
    return write_bundle(None, {k: v for k, v in opened.manifest.items() if k != "segments"}, segments)


def with_source(data, packed, size):
    """Return a bundle whose source segment is ``packed``, which has ``size`` bytes when decompressed."""
    opened = open_bundle(data)
    segments = [(row["name"], bytes(opened.segment(n))) for n, row in enumerate(opened.manifest["segments"])]
    segments[opened.manifest["source"]["segment"]] = "source", packed
    manifest = {k: v for k, v in opened.manifest.items() if k != "segments"}
    manifest["source"] = {**opened.manifest["source"], "bytes": size}
    return write_bundle(None, manifest, segments)


def with_source_of(data, other):
    """A bundle with the source of another one."""
    theirs = open_bundle(other)
    entry = theirs.manifest["source"]
    return with_source(data, bytes(theirs.segment(entry["segment"])), entry["bytes"])


def with_options(data, options):
    """Return a bundle whose source record sets ``options`` besides its own."""
    opened = open_bundle(data)
    held = zlib.decompress(opened.segment(opened.manifest["source"]["segment"]))
    record = msgpack.unpackb(held, strict_map_key=False)
    record["options"] |= options
    packed = msgpack.packb(record)
    return with_source(data, zlib.compress(packed), len(packed))


@pytest.mark.parametrize("how", ["trusting", "untrusted"])
def test_code_of_an_untrusted_bundle_never_runs(evil, tmp_path, how):
    """The same bundle, loaded without a thought, does write the file."""
    bundle, written = tmp_path / "evil.vmfb", tmp_path / "written"
    bundle.write_bytes(evil)
    environment = {**os.environ, "AOTC_EVIL": str(written), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, bundle, how], env=environment, capture_output=True, text=True, check=False
    )
    assert written.exists() == (how == "trusting")
    assert (done.returncode == 0) == (how == "untrusted"), done.stderr


def test_the_source_of_an_untrusted_bundle_is_compiled_and_run(evil):
    loaded = aotc.load(evil, untrusted=True, threads=1)
    np.testing.assert_allclose(loaded(X), X @ W, rtol=1e-4, atol=1e-4)
    aotc.load(aotc.compile(model, X), threads=1)
    assert len(native._PROCESS.executors) == 2, "an executor that an unsigned bundle brought serves no recompiled one"


def test_external_weights_of_an_untrusted_bundle_are_compared(tmp_path):
    path = tmp_path / "w.safetensors"
    bundle = tmp_path / "net.vmfb"
    bundle.write_bytes(aotc.compile(model, X, weights=str(path)))
    np.testing.assert_allclose(aotc.load(bundle, untrusted=True)(X), X @ W, rtol=1e-4, atol=1e-4)
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)
    with pytest.raises(aotc.BundleError, match="is not the one that was compiled"):
        aotc.load(bundle, untrusted=True)


@pytest.mark.parametrize("other", [lambda x: x @ W + x[:, :1].astype("i4"), lambda x: (x @ W, x), lambda x: (x @ W)[0]])
def test_a_source_of_another_program_is_refused(evil, other):
    wrong = with_source_of(evil, aotc.compile(lambda x: (other(x),), X))
    with pytest.raises(aotc.BundleError, match="another function 'main' than it says"):
        aotc.load(wrong, untrusted=True)


def test_an_untrusted_bundle_without_source_is_refused():
    with pytest.raises(aotc.BundleError, match="has no source"):
        aotc.load(aotc.compile(model, X, source=False), untrusted=True)
    with pytest.raises(aotc.BundleError, match="has no source"):
        aotc.load(tiny.bundle(), untrusted=True)


def test_a_source_that_does_not_compile_is_refused(evil):
    import jax

    @jax.jit
    def calls(x):
        return jax.ffi.ffi_call("nobody", jax.ShapeDtypeStruct((16, 200), "f4"))(x)

    aotc.register_custom_call("nobody", native=False)
    try:
        other = aotc.compile(calls, X)
    finally:
        from aotc.vmfb import custom_calls

        custom_calls._REGISTRY.pop("nobody", None)
    with pytest.raises(aotc.BundleError, match=r"(?s)cannot be compiled.*nobody"):
        aotc.load(with_source_of(evil, other), untrusted=True)


def test_a_bundle_with_a_trusted_signature_runs_unchanged(evil, tmp_path, monkeypatch):
    """A signed bundle loads as it is, without a compiler; any other needs one."""
    pytest.importorskip("cryptography")
    from aotc.tools.sign import new_key, sign_bundle

    for name in ("me", "other"):
        new_key(str(tmp_path / name))
    path, keys = tmp_path / "net.vmfb", [tmp_path / "me.pub"]
    path.write_bytes(aotc.compile(model, X))
    sign_bundle(str(path), str(tmp_path / "me"))
    with monkeypatch.context() as patch:
        patch.setitem(device.EXTRAS, "compile", "aotc.no_compiler")
        aotc.load(path, untrusted=True, trusted_keys=keys)(X)
        with pytest.raises(aotc.BundleError, match=r"\[compile\]"):
            aotc.load(path, untrusted=True)
    sign_bundle(str(path), str(tmp_path / "other"))
    for data in (path, evil):
        loaded = aotc.load(data, untrusted=True, trusted_keys=keys)
        np.testing.assert_allclose(loaded(X), X @ W, rtol=1e-4, atol=1e-4)
    with pytest.raises(aotc.BundleError, match="not trusted"):
        aotc.load(path, trusted_keys=keys)


def test_untrusted_option_of_run_compiles_the_source(evil, tmp_path, monkeypatch):
    from aotc_cli import main as cli

    path, written, result = tmp_path / "evil.vmfb", tmp_path / "written", tmp_path / "y.npy"
    path.write_bytes(evil)
    monkeypatch.setenv("AOTC_EVIL", str(written))
    monkeypatch.setattr(sys, "argv", ["aotc", "run", str(path), "--zeros", "--untrusted", f"--output=@{result}"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert not stopped.value.code
    assert np.load(result).shape == (16, 200)
    assert not written.exists()


def test_every_option_is_classified_for_the_source_record():
    """A new option needs a decision: may a record set it?"""
    every = sorted(f.name for f in fields(Options))
    assert sorted((*RECORDED, *OF_THE_RUN, *OUTSIDE_RECORD)) == every


@pytest.fixture(scope="module")
def sound():
    return aotc.compile(lambda x: x + 1, np.zeros(4, "f4"))


@pytest.mark.parametrize("name", [f.name for f in fields(Options)])
def test_a_source_record_sets_only_code_options(sound, name, tmp_path, monkeypatch):
    """A record that names a folder, a file, a pass to stop at or a process count is refused, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    value = getattr(Options(), name)
    hostile = {"dump_ir": "link/ir", "reproducer": "link", "weights": "link.safetensors", "stop_after": "fuse"}
    data = with_options(sound, {name: hostile.get(name, value if not callable(value) else 1)})
    if name in RECORDED:
        np.testing.assert_array_equal(aotc.load(data, untrusted=True)(np.zeros(4, "f4")), np.ones(4, "f4"))
    else:
        for use in (lambda: aotc.load(data, untrusted=True), lambda: aotc.upgrade(data)):
            with pytest.raises(aotc.BundleError, match=f"sets the option '{name}'"):
                use()
    assert [p.name for p in tmp_path.iterdir()] == ["link"]


def test_a_decompression_bomb_as_source_is_refused(sound):
    packed = zlib.compress(bytes(80 << 20))
    with pytest.raises(aotc.BundleError, match=r"(?s)it is too large.*83,886,080 bytes"):
        aotc.load(with_source(sound, packed, 80 << 20), untrusted=True)
    maps = b"\xdd" + (10 << 20).to_bytes(4, "big") + b"\x80" * (10 << 20)
    with pytest.raises(aotc.BundleError, match="too many for its size"):
        aotc.load(with_source(sound, zlib.compress(maps), len(maps)), untrusted=True)


def with_code(data, code):
    """Return a bundle whose source record has other bytecode."""
    opened = open_bundle(data)
    held = zlib.decompress(opened.segment(opened.manifest["source"]["segment"]))
    packed = msgpack.packb({**msgpack.unpackb(held, strict_map_key=False), "code": code, "holes": []})
    return with_source(data, zlib.compress(packed), len(packed))


def test_a_source_that_crashes_its_reader_or_exhausts_memory_is_refused(sound, monkeypatch):
    """The child that reads it ends in place of this process."""
    opened = open_bundle(sound)
    held = zlib.decompress(opened.segment(opened.manifest["source"]["segment"]))
    code = msgpack.unpackb(held, strict_map_key=False)["code"]
    crashing = next(c for c in flips(code) if "MLIR crashes" in reader_process.read_in_child(c, seconds=5).problem)
    monkeypatch.setattr(recompile, "UNTRUSTED_SECONDS", 20)
    with pytest.raises(aotc.BundleError, match=r"(?s)source of the bundle cannot be read.*MLIR crashes"):
        aotc.load(with_code(sound, crashing), untrusted=True)
    monkeypatch.setattr(reader_process, "UNTRUSTED_BYTES", 1 << 20)
    monkeypatch.setattr(reader_process, "UNTRUSTED_RATIO", 1)
    text = "func.func @f() {return}\n" + "".join(f"func.func @f{n}() {{return}}\n" for n in range(20_000))
    with pytest.raises(aotc.BundleError, match=r"(?s)source of the bundle cannot be read.*needs more than 1 MB"):
        aotc.load(with_code(sound, text.encode()), untrusted=True)


def flips(code):
    """Yield ``code`` with one byte changed, at each place."""
    for at in range(40, len(code)):
        yield code[:at] + bytes((code[at] ^ 0x5A,)) + code[at + 1 :]
