"""Pages on adding something are walked: their blocks are applied to a copy of the tree, which then has it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
PAGES = ("docs/add_an_op.md", "docs/add_a_template.md", "docs/add_a_pass.md", "docs/add_a_device.md")
BLOCK = re.compile(
    r"^(?:Write `(?P<new>[\w./]+)`|In `(?P<file>[\w./]+)`, (?P<how>before|after|instead of) `(?P<line>[^\n]+)`):\n\n"
    r"```\w+\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)

COPY = re.compile(r"^Copy `([\w./]+)` to `([\w./]+)`", re.MULTILINE)

OPS = """
import jax
import jax.numpy as jnp
import numpy as np

import aotc

assert aotc.__file__.startswith({root!r}), aotc.__file__


def model(x, y, n):
    counts = jax.ffi.ffi_call("bincount", jax.ShapeDtypeStruct((5,), np.int32))(n)
    return jax.lax.mulhi(x, y) + 1, jax.lax.mulhi(x.astype("u4"), y.astype("u4")), 2 * counts


rng = np.random.default_rng(0)
x, y = (rng.integers(-(2**31), 2**31, (6, 7), np.int32) for _ in range(2))
n = rng.integers(-1, 7, 1000).astype(np.int32)
high, unsigned, counts = aotc.load(aotc.compile(model, x, y, n, verify_each=True))(x, y, n)
np.testing.assert_array_equal(high, ((x.astype("i8") * y) >> 32).astype("i4") + 1)
np.testing.assert_array_equal(unsigned, ((x.astype("u4").astype("u8") * y.astype("u4")) >> 32).astype("u4"))
np.testing.assert_array_equal(counts, 2 * np.bincount(n[(n >= 0) & (n < 5)], minlength=5))
np.testing.assert_array_equal(high, jax.jit(jax.lax.mulhi)(x, y) + 1)
"""

DEVICE = """
import jax
import jax.numpy as jnp
import numpy as np

import aotc


def model(x, w, n):
    y = jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: c * 2, jax.nn.softmax(x @ w))
    z = jax.lax.cond(n > 0, lambda v: jnp.sort(v), lambda v: v.cumsum(0), y)
    return z, jnp.sum(y > 1), jax.lax.dynamic_update_slice(x, y, (0, 0)), w + np.arange(42, dtype="f4").reshape(7, 6)


x, w = (np.random.default_rng(0).normal(size=s).astype("f4") for s in ((5, 7), (7, 6)))
module = aotc.load(aotc.compile(model, x, w, np.int32(0), target="numpy:any", verify_each=True))
for n in (np.int32(0), np.int32(1)):
    for a, b in zip(module(x, w, n), jax.jit(model)(x, w, n), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""


def apply(page, root):
    """Write every block of a page to its place under ``root``; each must have exactly one."""
    blocks = list(BLOCK.finditer(page))
    assert len(blocks) == page.count("\n```") / 2, "each block needs a line that says where it belongs"
    for block in blocks:
        text = block["text"]
        if block["new"]:
            path = root / block["new"]
            assert not path.exists(), f"{path} is there already"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            continue
        path = root / block["file"]
        lines = path.read_text().splitlines(keepends=True)
        places = [n for n, line in enumerate(lines) if line.startswith(block["line"])]
        assert len(places) == 1, f"{len(places)} lines of {block['file']} begin with {block['line']!r}"
        (at,) = places
        begin, end = {"before": (at, at), "after": (at + 1, at + 1), "instead of": (at, at + 1)}[block["how"]]
        lines[begin:end] = [text]
        path.write_text("".join(lines))
    for source, target in COPY.findall(page):
        shutil.copy(root / source, root / target)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    """A copy of the tree in which the pages have been walked."""
    root = tmp_path_factory.mktemp("walked")
    for folder in ("aotc", "cli", "tests", "docs"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    for page in PAGES:
        apply((ROOT / page).read_text(), root)
    return root


def run(root, *command):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *command], cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ops_of_the_add_an_op_page_compile_and_run(walked):
    run(walked, "-c", OPS.format(root=str(walked)))


def test_ops_of_the_add_an_op_page_pass_the_op_checks(walked):
    case = walked / "tests/golden/lower/indexing/bincount.txt"
    words = "-k", "bincount or every_region_kind", "--update"
    run(walked, "-m", "pytest", "tests/lowering/test_golden_lower.py", *words)
    assert "def k(" in case.read_text()
    run(walked, "-m", "pytest", "tests/house/test_op_facts.py", "-k", "mulhi or bincount or families")


def test_the_pass_of_the_add_a_pass_page_passes_the_pass_checks(walked):
    cases = list((walked / "tests/golden/passes/negate_equality").glob("*.txt"))
    words = "-k", "negate_equality or three_golden_cases", "--update"
    run(walked, "-m", "pytest", "tests/lowering/test_passes.py", *words)
    assert all(case.read_text().count("module @m") == 2 for case in cases)
    run(walked, "-m", "pytest", "tests/house/test_pass_files.py")


def test_the_device_of_the_add_a_device_page_runs_programs(walked):
    run(walked, "-c", DEVICE)
