"""One call, a dispatch at a time: the arrays of each in a file, and the same results as a plain call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.mixed_dims import DIMS, PROGRAMS, SUBSETS
from typer.testing import CliRunner

import aotc
from aotc.vmfb.errors import CallError
from aotc_cli.main import app

pytestmark = pytest.mark.cpu
SIZES = {"tokens": 7, "experts": 2, "k": 3, "features": 5}


def traced(module, folder, *arguments):
    """Return the results of a traced call and its files in order."""
    results = module.invoke("main", *arguments, trace=folder)
    return results, [dict(np.load(f)) for f in sorted(folder.glob("*.npz"))]


def test_each_dispatch_says_what_it_read_wrote_and_where_it_comes_from(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    module = aotc.load(aotc.compile(jax.jit(lambda x: jnp.tanh(x).sum(1)), x, opt_level=0))
    (found,), files = traced(module, tmp_path, x)
    np.testing.assert_allclose(found, np.tanh(x).sum(1), rtol=1e-6)
    first, second = files
    np.testing.assert_array_equal(first["a0"], x)
    np.testing.assert_allclose(first["o0"], np.tanh(x), rtol=1e-6)
    np.testing.assert_array_equal(second["a0"], first["o0"])
    np.testing.assert_array_equal(second["o0"], found)
    assert "tanh" in str(first["kernel"])
    assert "test_trace.py" in str(first["loc"])
    assert list(first["dtypes"]) == ["a0=f32", "o0=f32"]


def test_loops_branches_and_narrow_types(tmp_path):
    def fn(x, n):
        w = jnp.eye(64, dtype=x.dtype) * 2
        y = lax.fori_loop(0, n, lambda i, c: c @ w, x)
        return lax.cond(n > 2, lambda v: v + 1, lambda v: v @ w, y).astype(jnp.bfloat16)

    x = np.ones((64, 64), np.float32)
    module = aotc.load(aotc.compile(jax.jit(fn), x, np.int32(0)))
    for n in (0, 3):
        folder = tmp_path / str(n)
        (found,), files = traced(module, folder, x, np.int32(n))
        np.testing.assert_array_equal(found, np.asarray(fn(x, n)))
        products = sum("matmul" in str(f["kernel"]) for f in files)
        assert products >= n
        assert files[-1]["o0"].dtype in (np.uint16, np.float32)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "number", [n if n in (1, 6, 15) else pytest.param(n, marks=pytest.mark.slow) for n in range(16)]
)
def test_dynamic_builds_dispatch_what_the_static_build_does(program, number, tmp_path):
    text, arrays = PROGRAMS[program]
    arguments, wanted = arrays(SIZES)
    lists = []
    for dynamic in (frozenset(), SUBSETS[number]):
        module = aotc.load(aotc.compile(text(dynamic, SIZES).encode(), opt_level=0), threads=1)
        (found,), files = traced(module, tmp_path / "+".join(["run", *(d for d in DIMS if d in dynamic)]), *arguments)
        np.testing.assert_array_equal(found, wanted)
        lists.append(files)
    static, mixed = (sorted(files, key=lambda f: str(f["kernel"])) for files in lists)  # sizes decide about the order
    assert [str(f["kernel"]) for f in static] == [str(f["kernel"]) for f in mixed]
    for a, b in zip(static, mixed, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"loc"}:
            np.testing.assert_array_equal(a[key], b[key], err_msg=f"{a['kernel']} {key}")


def test_an_operand_that_is_overwritten_is_kept_as_it_was(tmp_path):
    arguments, _ = PROGRAMS["scatter"][1](SIZES)
    module = aotc.load(aotc.compile(PROGRAMS["scatter"][0](frozenset(), SIZES).encode()))
    _, files = traced(module, tmp_path, *arguments)
    np.testing.assert_array_equal(files[-1]["a0"], arguments[0])


def test_on_the_command_line(tmp_path):
    bundle, x = tmp_path / "m.vmfb", np.arange(4, dtype=np.float32)
    bundle.write_bytes(aotc.compile(jax.jit(jnp.exp), x))
    np.save(tmp_path / "x.npy", x)
    folder = tmp_path / "trace"
    made = CliRunner().invoke(
        app, ["run", str(bundle), f"--input=@{tmp_path}/x.npy", f"--trace-dispatch-tensors={folder}"]
    )
    assert made.exit_code == 0, made.output
    (file,) = folder.glob("*.npz")
    np.testing.assert_allclose(np.load(file)["o0"], np.exp(x), rtol=1e-6)


def test_a_bundle_without_kernel_text_cannot_be_traced(tmp_path):
    module = aotc.load(aotc.compile(jax.jit(jnp.exp), np.ones(3, np.float32), debug_info=False))
    with pytest.raises(CallError, match="no kernel text"):
        module.invoke("main", np.ones(3, np.float32), trace=tmp_path)


def test_a_full_disk_ends_a_traced_call(tmp_path, monkeypatch):
    def full(path, **arrays):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    module = aotc.load(aotc.compile(jax.jit(jnp.tanh), np.ones(3, "f4")))
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(CallError, match="cannot write the trace: No space left"):
        module.invoke("main", np.ones(3, "f4"), trace=tmp_path)
    assert list(tmp_path.iterdir()) == []
