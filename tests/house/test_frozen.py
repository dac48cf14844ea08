"""The comparison of what two states of the compiler make sees a change of one instruction."""

import jax
import numpy as np
import pytest
from jax import export
from support import frozen

from aotc.kernels.cpu import build, link
from aotc.kernels.cuda import build as cuda_build
from aotc.kernels.emit import real
from aotc.kernels.jobs import cache

pytestmark = pytest.mark.cudasim


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A model of two kernels; the compiler is put back afterwards."""
    changed = [(build.Compilation, name) for name in ("begin_ahead", "finish", "write_to_cache")]
    changed += [(cuda_build, "compile_texts"), (link.Linker, "send_objects"), (link.Linker, "linked_library")]
    for owner, name in changed:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(build, "_EXECUTORS", {})
    x = np.ones((4, 6), "float32")
    path = tmp_path / "model.jaxexp"
    path.write_bytes(export.export(jax.jit(lambda x: (x - 1, (x - 1).sum(0))))(x).serialize())
    return path


def test_one_compiler_gives_equal_frozen_pieces(model):
    before = frozen.frozen(model, 0, False)
    assert any(piece.startswith("segment cuda:sm_90") for piece in before)
    assert frozen.differences({"m": before}, {"m": frozen.frozen(model, 0, False)}) == []


def test_one_different_instruction_is_found(model, monkeypatch):
    before = frozen.frozen(model, 0, False)
    monkeypatch.setitem(real.FLOATS, "sub", real.FLOATS["add"])
    names = frozen.differences({"m": before}, {"m": frozen.frozen(model, 0, False)})
    assert [n for n in names if "kernels.so" in n or "cubin" in n], names


def test_bundles_do_not_depend_on_the_compiler_digest(model, monkeypatch):
    """A comment in the compiler changes the keys of its cache, and nothing in a bundle."""
    before = frozen.frozen(model, 0, False)
    monkeypatch.setattr(cache, "compiler_digest", lambda kind: b"another compiler")
    assert frozen.differences({"m": before}, {"m": frozen.frozen(model, 0, False)}) == []
