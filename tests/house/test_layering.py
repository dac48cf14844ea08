"""Who may import whom, and a runtime that is cut off from the compiler."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import tiny

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
SHARED = ("aotc.diagnostics", "aotc.options", "aotc.recursion_limit", "aotc.targets")

# For each part of the house: what it may import besides the standard library and itself.
MAY_IMPORT = {
    "aotc.vmfb": ("numpy", "msgpack", "ml_dtypes"),
    "aotc.frontend": (
        "numpy",
        "scipy",
        "ml_dtypes",
        "jax",
        "jaxlib",
        "aotc.vmfb.dtypes",
        "aotc.vmfb.float_formats",
        "aotc.diagnostics",
        "aotc.recursion_limit",
    ),
    "aotc.lowering": (
        "numpy",
        "ml_dtypes",
        "aotc.frontend",
        "aotc.vmfb.abi",
        "aotc.vmfb.dtypes",
        "aotc.vmfb.float_formats",
        "aotc.vmfb.isa",
        "aotc.vmfb.assembly",
        *SHARED,
    ),
    "aotc.kernels": (
        "numpy",
        "ml_dtypes",
        "msgpack",
        "numba",
        "llvmlite",
        "aotc.lowering",
        "aotc.ir.dims",
        "aotc.vmfb.abi",
        "aotc.vmfb.dtypes",
        "aotc.vmfb.float_formats",
        *SHARED,
    ),
    "aotc.diagnostics": (),
    "aotc.options": (),
    "aotc.recursion_limit": (),
    "aotc.targets": ("aotc.diagnostics",),
    "aotc.pipeline": ("aotc",),
    "aotc.assemble": ("numpy", "aotc"),
    "aotc.tools.lint": ("aotc",),
    "aotc.tools.check": ("numpy", "aotc"),
    "aotc.tools.agreement": ("numpy", "ml_dtypes"),
    "aotc.tools.user_calls": ("numpy", "aotc"),
    "aotc.bundle_cache": ("aotc.frontend.mlir", "aotc.kernels.workers.cache", "aotc.vmfb.custom_calls", *SHARED),
    "aotc.weights": ("numpy", "aotc.lowering", "aotc.vmfb"),
    "aotc.__init__": (),
    "cli": ("numpy", "typer", "rich", "aotc", "aotc_cli"),
}

# Packages that only some modules of a part may import.
ONLY = {
    "cuda": ("aotc.kernels.cuda.",),
    "jax": ("aotc.frontend.",),
    "jaxlib": ("aotc.frontend.",),
    "numba": ("aotc.kernels.",),
    "llvmlite": ("aotc.kernels.",),
    "pickle": (),
}
KERNELS_SEE = ("aotc.lowering.loop_", "aotc.lowering.analysis.tiling")


def modules():
    """Each module's name and syntax tree."""
    for folder in ("aotc", "cli"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            yield name, ast.parse(path.read_text())


def imports(tree):
    """Names of all modules that a tree imports, also inside functions; those under TYPE_CHECKING count too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield node.module
            if node.module.startswith("aotc"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.islower())


def part_of(name):
    """Return the row of the table that a module belongs to."""
    return next(part for part in MAY_IMPORT if name == part or name.startswith(part + "."))


def within(name, prefixes):
    """Is ``name`` one of ``prefixes``, inside of one, or a package around one?"""
    return any(name == p or name.startswith(p + ".") or p.startswith(name + ".") for p in prefixes)


def test_imports_follow_the_arrows():
    wrong = []
    for name, tree in modules():
        part = part_of(name)
        allowed = (part, *MAY_IMPORT[part])
        for found in imports(tree):
            top = found.partition(".")[0]
            if top in sys.stdlib_module_names and top not in ONLY:
                continue
            if not within(found, allowed) and not (top in ONLY and name.startswith(ONLY[top])):
                wrong.append(f"{name} imports {found}")
    assert not wrong


def test_packages_with_one_importer():
    for name, tree in modules():
        for found in imports(tree):
            top = found.partition(".")[0]
            if top in ONLY:
                assert name.startswith(ONLY[top]), f"{name} imports {found}"


def test_kernels_see_only_the_loop_ir():
    for name, tree in modules():
        if name.startswith("aotc.kernels"):
            for found in imports(tree):
                if found.startswith("aotc.lowering."):
                    assert found.startswith(KERNELS_SEE), f"{name} imports {found}"


SEVERED = """
import sys

class Guard:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        inner = name in ("aotc", "aotc.vmfb") or name.startswith("aotc.vmfb.")
        if inner or top in ("numpy", "msgpack", "ml_dtypes", "sitecustomize"):
            return None
        if top in sys.stdlib_module_names:
            return None
        raise ImportError(f"the runtime may not import {name}")

sys.meta_path.insert(0, Guard())
import numpy as np
import aotc
module = aotc.load(sys.argv[1], threads=1, verify=True)
x = np.arange(4, dtype=np.float32)
assert module(x, x).tolist() == [0, 2, 4, 6]
assert "ml_dtypes" not in sys.modules
assert not any(name.startswith(("aotc.frontend", "aotc.lowering", "aotc.kernels")) for name in sys.modules)
"""


def test_the_runtime_alone_runs_a_bundle(tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(tiny.bundle())
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SEVERED, path], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
