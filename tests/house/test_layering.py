"""Who may import whom, and a runtime that is cut off from the compiler."""

import ast
import os
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support import tiny

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
COMMON = ("aotc.diagnostics", "aotc.support.memoize", "aotc.options", "aotc.support.recursion_limit", "aotc.progress",
          "aotc.targets", "aotc.vmfb.log")
CONTRACTS = (
    "aotc.vmfb.abi", "aotc.vmfb.assumed_sizes", "aotc.vmfb.commands", "aotc.vmfb.dtypes", "aotc.vmfb.float_formats",
    "aotc.vmfb.verify.kernel_interface",
    "aotc.vmfb.isa", "aotc.vmfb.messages", "aotc.vmfb.profile.cost_record", "aotc.vmfb.ranks.layout",
    "aotc.vmfb.ranks.gpu_reductions",
)  # fmt: skip
FACTS = ("numpy", "aotc.ir", "aotc.lowering.threshold", *COMMON, *CONTRACTS)  # in the order of the rooms of lowering
MODEL = ("aotc.lowering.analysis", *FACTS)
ELEMENTS = ("aotc.lowering.cost_model", *MODEL)
PLANS = ("aotc.lowering.elements", *ELEMENTS)
PLACEMENT = ("aotc.lowering.plans", *PLANS)
LOWERING = ("aotc.lowering.placement", *PLACEMENT)

# For each room of the house: what it may import besides the standard library and itself. A name of a folder stands for
# all in it. The longest name that fits a module is its room.
MAY_IMPORT = {
    "aotc.vmfb": ("numpy", "msgpack", "ml_dtypes"),
    "aotc.ir": ("numpy", "scipy", "ml_dtypes", "aotc.diagnostics", "aotc.support.memoize", *CONTRACTS),
    "aotc.source": ("numpy", "msgpack", "aotc.ir", "aotc.vmfb", *COMMON),
    "aotc.frontend": (
        "numpy", "ml_dtypes", "jax", "jaxlib", "aotc.ir", "aotc.guard", "aotc.vmfb.limits", "aotc.vmfb.custom_calls",
        "aotc.source.bytecode", "aotc.source.reader_process", "aotc.vmfb.host.children", "aotc.vmfb.host.install",
        "aotc.vmfb.profile.model_place", "aotc.kernels.jobs.store", *COMMON, *CONTRACTS,
    ),
    "aotc.lowering": (),
    "aotc.lowering.threshold": ("aotc.ir",),
    "aotc.lowering.tuning": (
        "aotc.ir", "aotc.lowering.threshold", "aotc.vmfb.profile.cost_record", "aotc.vmfb.verify.schema", *COMMON,
    ),
    "aotc.lowering.analysis": FACTS,
    "aotc.lowering.cost_model": MODEL,
    "aotc.lowering.elements": ELEMENTS,
    "aotc.lowering.plans": PLANS,
    "aotc.lowering.placement": PLACEMENT,
    "aotc.lowering.passes": ("ml_dtypes", *LOWERING),
    "aotc.lowering.regions": LOWERING,
    "aotc.lowering.program": LOWERING,
    "aotc.lowering.invariants": ("aotc.ir", "aotc.lowering.passes.dce", *COMMON),
    "aotc.lowering.verify": (
        "aotc.ir", "aotc.lowering", "aotc.vmfb.abi", "aotc.vmfb.commands", "aotc.vmfb.verify.kernel_interface",
        "aotc.vmfb.verify.program", *COMMON,
    ),
    "aotc.lowering.lower": (
        "aotc.ir", "aotc.lowering", "aotc.guard", "aotc.vmfb.abi", "aotc.vmfb.custom_calls", "aotc.vmfb.ranks.layout",
        *COMMON,
    ),
    "aotc.kernels": (
        "numpy", "ml_dtypes", "msgpack", "numba", "llvmlite", "cuda", "aotc.ir", "aotc.vmfb.host.files",
        "aotc.vmfb.host.children", "aotc.vmfb.host.install", *COMMON, *CONTRACTS,
    ),
    "aotc.diagnostics": ("aotc.vmfb.errors",),
    "aotc.support.memoize": (),
    "aotc.bundle": ("aotc",),  # what a notebook shows of it is aotc.inspect, by its public name
    "aotc.options": (
        "aotc.diagnostics", "aotc.vmfb.result_names", "aotc.vmfb.errors",
        "aotc.vmfb.host.byte_sizes",
    ),
    "aotc.display": ("aotc.diagnostics", "aotc.vmfb.profile.model_place"),
    "aotc.driver": (),
    "aotc.support": (),
    "aotc.driver.compress_constants": (
        "numpy", "aotc.ir.program", "aotc.vmfb.limits", "aotc.vmfb.weights.differences",
    ),
    "aotc.driver.weights": ("aotc.guard", "aotc.ir", "aotc.vmfb", *COMMON),
    "aotc.driver.gpu_kernels": ("aotc.ir", "aotc.kernels", "aotc.vmfb"),
    "aotc.driver.gpu_sources": (
        "aotc.driver.gpu_kernels", "aotc.ir", "aotc.kernels", "aotc.lowering.regions.custom_call", "aotc.vmfb", *COMMON,
    ),
    "aotc.driver.declare_state": (
        "aotc.ir", "aotc.lowering.passes.bind_weights", "aotc.vmfb.result_names", *COMMON,
    ),
    "aotc.support.recursion_limit": (),
    "aotc.progress": ("aotc.options", "aotc.vmfb.log"),
    "aotc.support.gc_pause": (),
    "aotc.target_gpus": (),
    "aotc.targets": ("aotc.diagnostics", "aotc.target_gpus", "aotc.vmfb.host.machine"),
    "aotc.guard": (
        "aotc.diagnostics", "aotc.options", "aotc.ir", "aotc.vmfb.errors", "aotc.vmfb.host.files",
        "aotc.vmfb.host.install",
    ),
    "aotc.driver.assemble": ("numpy", "aotc"),
    "aotc.driver.output_path": ("aotc.diagnostics",),
    "aotc.driver.function_signatures": (
        "aotc.diagnostics", "aotc.ir", "aotc.lowering", "aotc.vmfb.module", "aotc.vmfb.ranks.layout", "aotc.vmfb.trees",
    ),
    "aotc.driver.bundle_cache": (
        "aotc.frontend.mlir", "aotc.kernels.jobs.cache", "aotc.kernels.jobs.store",
        "aotc.vmfb.custom_calls", *COMMON,
    ),
    "aotc.pipeline": ("aotc",),
    "aotc.recompile": ("aotc",),
    "aotc.serve": (
        "numpy", "starlette", "uvicorn", "grpc", "google", "prometheus_client", "opentelemetry", "aotc.vmfb",
    ),
    "aotc.serve.ray": ("ray", "aotc.serve", "aotc.vmfb"),
    "aotc.serve.ray_gang": ("ray", "numpy", "aotc.vmfb"),
    "aotc.tools.sign": ("cryptography", "aotc.vmfb"),
    "aotc.tools": ("numpy", "ml_dtypes", "aotc"),
    "aotc.__init__": (),
    "aotc.__main__": (),
    "cli": ("numpy", "typer", "rich", "aotc", "aotc_cli"),
}  # fmt: skip

# Packages that only some rooms may import.
ONLY = {
    "cuda": ("aotc.kernels.cuda",),
    "jax": ("aotc.frontend",),
    "jaxlib": ("aotc.frontend",),
    "numba": ("aotc.kernels",),
    "llvmlite": ("aotc.kernels",),
    "pickle": (),
    "cryptography": ("aotc.tools.sign",),
    "ray": ("aotc.serve.ray", "aotc.serve.ray_gang"),
    "starlette": ("aotc.serve",),
    "uvicorn": ("aotc.serve",),
    "grpc": ("aotc.serve",),
    "google": ("aotc.serve",),
    "prometheus_client": ("aotc.serve",),
    "opentelemetry": ("aotc.serve",),
}


@cache
def modules():
    """Each module's name and syntax tree."""
    paths = [path for folder in ("aotc", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts), ast.parse(p.read_text())) for p in paths]


@cache
def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@cache
def imports(tree):
    """Names of all modules that a tree imports, also inside functions; those under TYPE_CHECKING count too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if is_module(name) else node.module for name in inner]
    return names


# Modules that import others by name, which hides an arrow: each with its reason.
IMPORT_BY_NAME = {
    "aotc.__init__": "the public names, imported on first use",
    "aotc.__main__": "the command line, a package above this one",
    "aotc.vmfb.device": "the tables of plugins: kinds of devices, and what is outside of the runtime",
    "cli.main": "a subcommand, by its name: each process imports one",
    "aotc.vmfb.host.digests": "a private module of CPython, whose name depends on the version",
}


def test_only_tables_import_modules_by_name():
    def is_by_name(node):
        if isinstance(node, ast.ImportFrom):
            return node.module == "importlib" and any(alias.name == "import_module" for alias in node.names)
        if isinstance(node, ast.Attribute):
            return node.attr == "import_module"
        return isinstance(node, ast.Name) and node.id == "__import__"

    found = {name for name, tree in modules() if any(map(is_by_name, ast.walk(tree)))}
    assert found == set(IMPORT_BY_NAME)


def room_of(name):
    """Return the row of the table that a module belongs to."""
    return max((room for room in MAY_IMPORT if inside(name, room)), key=len)


def inside(name, room):
    """Is ``name`` that room, or in it?"""
    return name == room or name.startswith(room + ".")


def test_imports_follow_the_allowed_packages():
    wrong = []
    for name, tree in modules():
        room = room_of(name)
        allowed = (room, *MAY_IMPORT[room])
        for imported in imports(tree):
            top = imported.partition(".")[0]
            standard = top in sys.stdlib_module_names and top not in ONLY
            lazy = room == "aotc.__init__" and inside(imported, "aotc")
            if not standard and not lazy and not any(inside(imported, a) for a in allowed):
                wrong.append(f"{name} imports {imported}")
    assert not wrong


def test_external_packages_have_only_their_importers():
    for name, tree in modules():
        for imported in imports(tree):
            rooms = ONLY.get(imported.partition(".")[0])
            assert rooms is None or any(inside(name, room) for room in rooms), f"{name} imports {imported}"


def test_imports_have_no_cycle():
    """Among modules, imports inside functions counted; the package's own lazy names are not."""
    trees = dict(modules())
    del trees["aotc.__init__"]
    graph = {name: {i for i in imports(tree) if inside(i, "aotc")} for name, tree in trees.items()}
    done, circles = set(), []

    def visit(name, path):
        if name in path:
            circles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name in graph and name not in done:
            for imported in sorted(graph[name]):
                visit(imported, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    assert not circles


LLVM_BINDING = "llvmlite.binding"
BACK_END = ("aotc.kernels.back_end", "aotc.kernels.loop_addresses", "aotc.kernels.unlocked")
"""The modules that call LLVM; all others compile through the libraries of the first."""


def test_only_the_back_end_calls_llvm():
    users = set()
    for name, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            if any(f"{n}.".startswith(f"{LLVM_BINDING}.") for n in named):
                users.add(name)
    assert users == set(BACK_END)


SLOW_TO_IMPORT = (
    "jax", "jaxlib", "numba", "llvmlite", "cuda", "scipy", "ml_dtypes", "cryptography", "grpc", "google",
    "opentelemetry",
)  # fmt: skip
QUICK_TO_START = ("aotc.vmfb", "aotc.__init__", "aotc.bundle", "cli")


def test_imports_inside_functions_defer_a_slow_package():
    """Something that the module itself does not import. Where the start of a process counts, any may be deferred."""
    trees = dict(modules())

    def slow(name, seen):
        """Which slow packages are imported with ``name``?"""
        package = name.partition(".")[0]
        if package in SLOW_TO_IMPORT:
            return {package}
        tree = trees.get(name) or trees.get(f"{name}.__init__")
        if tree is None or name in seen:
            return set()
        seen.add(name)
        top = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        return set().union(*(slow(i, seen) for i in imports(top)))

    wrong = []
    for name, tree in trees.items():
        if not any(inside(name, room) for room in QUICK_TO_START):
            loaded = slow(name, set())
            functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            deferred = {imported for f in functions for imported in imports(f)}
            wrong += [f"{name} imports {i} inside a function" for i in sorted(deferred) if not slow(i, set()) - loaded]
    assert not wrong


def test_folders_have_at_most_40_files():
    for folder in {p.parent for part in ("aotc", "cli", "tests") for p in (ROOT / part).rglob("*.py")}:
        count = len(list(folder.glob("*.py")))
        assert count <= 40, f"{folder.relative_to(ROOT)} has {count} files: does one sentence name its topic?"


DEVICES = ("cpu", "gpu")  # no topic: the device that a file of regions and plans is for
# Names of passes are those of their rows; a file of ops begins with the name of its family (test_op_facts.py).
NAMED_BY_ROWS = ("aotc/lowering/passes", "aotc/ir/opset", "aotc/frontend/importers")


def test_four_files_with_a_common_prefix_are_a_folder():
    wrong = []
    for folder in {p.parent for part in ("aotc", "cli") for p in (ROOT / part).rglob("*.py")}:
        prefixes = Counter(p.stem.partition("_")[0] for p in folder.glob("*.py") if "_" in p.stem[1:])
        is_table = str(folder.relative_to(ROOT)) in NAMED_BY_ROWS
        wrong += [f"{folder}: {p}" for p, n in prefixes.items() if n > 3 and p not in DEVICES and not is_table]
    assert not wrong


def test_folders_have_at_least_three_modules():
    """A folder that only holds folders is none of these."""
    counts = {}
    for folder in {p.parent for part in ("aotc", "cli") for p in (ROOT / part).rglob("*.py")}:
        inner = [p for p in folder.iterdir() if p.is_dir() and any(p.glob("*.py"))]
        counts[str(folder.relative_to(ROOT))] = len(list(folder.glob("*.py"))) - 1 + 3 * len(inner)
    assert not {folder: count for folder, count in counts.items() if count < 3}


# Folders that import one that imports them, as (from, to): at most four in the runtime, each with its reason.
ARROWS_BACK_UP = {
    ("aotc.vmfb.devices.cuda", "aotc.vmfb.devices.mixed"): "a variant on one GPU is a mix with one memory",
}


@pytest.mark.parametrize("package", ["aotc.lowering", "aotc.frontend", "aotc.ir", "aotc.kernels", "aotc.vmfb"])
def test_folder_imports_have_no_cycle(package):
    """Of folders in one folder, none imports another that imports it, also through others or inside functions."""
    graph = {}
    for name, tree in modules():
        if inside(name, package):
            here = name.rpartition(".")[0]
            folders = {i.rpartition(".")[0] for i in imports(tree)}
            graph.setdefault(here, set()).update(f for f in folders if (here, f) not in ARROWS_BACK_UP)

    def reached(folder, seen):
        for other in graph.get(folder, ()):
            beside = inside(other, package) and not inside(folder, other) and not inside(other, folder)
            if beside and other not in seen:
                seen.add(other)
                reached(other, seen)
        return seen

    assert not [folder for folder in graph if folder in reached(folder, set())]


def test_every_folder_is_packaged():
    rows = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "aotc").rglob("*.py")}
    commands = {".".join(("aotc_cli", *p.parent.relative_to(ROOT).parts[1:])) for p in (ROOT / "cli").rglob("*.py")}
    assert sorted(rows) == sorted(folders | commands)


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


SEVERED_FROM_THE_COMPILER = SEVERED.partition("import numpy as np")[0] + """
import aotc
try:
    aotc.load(sys.argv[1], untrusted=True)
except aotc.BundleError as error:
    assert "[compile]'" in str(error), error
else:
    raise AssertionError("loaded")
"""


def test_the_runtime_alone_refuses_untrusted_bundles(tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(tiny.bundle())
    command = [sys.executable, "-c", SEVERED_FROM_THE_COMPILER, path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
