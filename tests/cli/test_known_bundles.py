"""The bundle of a file that was compiled before is found without the compiler, and of nothing else."""

import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import aotc
from aotc import pipeline
from aotc.driver import bundle_cache
from aotc.options import Options

EXPORTED = jax.export.export(jax.jit(lambda x: jnp.tanh(x) + 1))(jax.ShapeDtypeStruct((3,), "float32"))
FORMS = {
    "text": EXPORTED.mlir_module().encode(), "bytecode": EXPORTED.mlir_module_serialized, "blob": EXPORTED.serialize(),
}  # fmt: skip
COMMAND = """
import sys
from aotc_cli.start import main
sys.argv = ["aotc", "compile", *sys.argv[1:], "-q"]
try:
    main()
except SystemExit as done:
    assert not done.code, done.code
print(*sorted({"jax", "jaxlib", "llvmlite", "numba", "aotc.pipeline"} & set(sys.modules)))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(pipeline, "WORTH_SECONDS", 0)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_the_command_reads_a_cached_bundle_without_the_compiler(folder, form):
    path = folder / "model"
    path.write_bytes(FORMS[form])
    data = aotc.compile(path)
    command = [sys.executable, "-c", COMMAND, path, "-o", folder / "model.vmfb"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    assert (folder / "model.vmfb").read_bytes() == data


@pytest.mark.parametrize("form", FORMS)
def test_the_bundle_cache_key_has_bytes_path_and_options(folder, form):
    path, options = folder / "model", Options()
    path.write_bytes(FORMS[form])
    assert bundle_cache.cached_bundle(path, options) is None
    data = aotc.compile(path)
    assert bundle_cache.cached_bundle(path, options) == data
    assert bundle_cache.cached_bundle(path, replace(options, opt_level=1)) is None
    assert bundle_cache.cached_bundle(path, replace(options, target="cpu:x86-64-v2")) is None
    assert bundle_cache.cached_bundle(path, replace(options, reproducer="file")) is None
    assert bundle_cache.cached_bundle(path, replace(options, cache=False)) is None
    (folder / "other").write_bytes(FORMS[form])
    assert bundle_cache.cached_bundle(folder / "other", options) is None
    path.write_bytes(FORMS[form] + b"\n")
    assert bundle_cache.cached_bundle(path, options) is None
    path.unlink()
    assert bundle_cache.cached_bundle(path, options) is None


def test_the_bundle_cache_key_ignores_example_values(folder):
    """A function has no file: its program is the key, with what jax.export knows of it."""
    data = aotc.compile(jnp.tanh, jnp.ones(3))
    again = [path.name for path in (folder / "cache" / "bundles").iterdir()]
    assert aotc.compile(jnp.tanh, jnp.zeros(3)) == data
    assert [path.name for path in (folder / "cache" / "bundles").iterdir()] == again
