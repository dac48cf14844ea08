"""The key of the object cache: what can change a compiled object changes it, and nothing else does."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotc.kernels.jobs import cache
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
DECIDES = ["ir/dims/algebra.py", "ir/loop/ir.py", "ir/loop/parser.py", "ir/loop/types.py",
           "ir/loop/forms/tile_forms.py",
           "ir/opset/elementwise.py", "targets.py", "kernels/emit/body.py", "kernels/formulas/erf.py",
           "kernels/worker.py", "vmfb/abi.py", "vmfb/dtypes.py"]  # fmt: skip
DOES_NOT = ["pipeline.py", "frontend/importer.py", "lowering/lower.py", "tools/lint.py", "vmfb/module.py",
            "kernels/cpu/build.py", "ir/loop/verify.py"]  # fmt: skip

KEY = """
from aotc.kernels.jobs.cache import object_cache_key
from aotc.targets import TARGETS
print(object_cache_key("text", TARGETS["cpu:x86-64-v3"]))
"""


def key_in(root):
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", KEY]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the package's sources, and the key that it gives."""
    root = tmp_path_factory.mktemp("sources")
    shutil.copytree(ROOT / "aotc", root / "aotc", ignore=shutil.ignore_patterns("__pycache__"))
    return root, key_in(root)


def key_after_a_comment(root, name):
    path = root / "aotc" / name
    text = path.read_bytes()
    path.write_bytes(text + b"#")
    try:
        return key_in(root)
    finally:
        path.write_bytes(text)


@pytest.mark.parametrize("name", DECIDES)
def test_a_byte_of_what_compiles_changes_the_key(sources, name):
    root, before = sources
    assert key_after_a_comment(root, name) != before


@pytest.mark.parametrize("name", DOES_NOT)
def test_a_byte_of_anything_else_does_not(sources, name):
    root, before = sources
    assert key_after_a_comment(root, name) == before


def test_the_key_depends_on_the_names_of_modules():
    """Two modules that trade their texts are another compiler."""
    one, other = {"a": b"x", "b": b"y"}, {"a": b"y", "b": b"x"}
    assert cache.digest_of_sources(one, ()) != cache.digest_of_sources(other, ())
    assert cache.digest_of_sources({"a": b"xb", "b": b""}, ()) != cache.digest_of_sources({"a": b"x", "b": b"b"}, ())


@pytest.mark.parametrize("package", ["numba", "llvmlite", "numpy", "ml_dtypes"])
@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cuda:sm_90a"])
def test_a_version_changes_the_key(monkeypatch, package, target):
    before = cache.object_cache_key("text", TARGETS[target])
    real = cache.version
    monkeypatch.setattr(cache, "version", lambda name: "0" if name == package else real(name))
    cache.compiler_digest.cache_clear()
    assert cache.object_cache_key("text", TARGETS[target]) != before
    monkeypatch.undo()
    cache.compiler_digest.cache_clear()
    assert cache.object_cache_key("text", TARGETS[target]) == before


def test_the_linker_of_cubins_is_in_their_key_alone(monkeypatch):
    real = cache.version
    targets = [TARGETS["cpu:x86-64-v3"], TARGETS["cuda:sm_90a"]]
    before = [cache.object_cache_key("text", t) for t in targets]
    monkeypatch.setattr(cache, "version", lambda name: "0" if name == "nvidia-nvjitlink" else real(name))
    cache.compiler_digest.cache_clear()
    after = [cache.object_cache_key("text", t) for t in targets]
    cache.compiler_digest.cache_clear()
    assert [a == b for a, b in zip(after, before)] == [True, False]


LOADED = """
import sys
from numba import cloudpickle
from aotc.kernels.cpu.executor import compile as compile_executor
from aotc.kernels import worker
from aotc.targets import TARGETS

compile_executor.read_prebuilt = lambda: None  # Numba makes the executor again

def twice(x, out):
    for i in range(x.size):
        out[i] = 2 * x[i]

def answer(target, **request):
    return worker.answer_compiler_request({"id": 0, "target": worker.target_fields(TARGETS[target]), **request})

cpu, gpu = "cpu:x86-64-v3", "cuda:sm_90a"
text = 'def double(a: "f32[8]", /, o: "f32[8]", *, grid: "8", flops: "8", bytes: "64"):\\n'
text += '    for i in parallel(0, 8):\\n        o[i] = exp(a[i]) + a[i]\\n'
answers = [answer(cpu, text=text), answer(cpu, executor=True)]
arrays = [["f32", 1], ["f32", 1]]
answers.append(answer(cpu, custom=cloudpickle.dumps(twice), symbol="twice", arrays=arrays, values=[]))
answers.append(answer(gpu, text=text))
for a in answers:
    assert "object" in a or "nvjitlink" in a["error"], a
print(*[n for n in sys.modules if n == "aotc" or n.startswith("aotc.")])
"""


def test_the_closure_has_all_that_compiling_loads():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert {"aotc.kernels.cuda.compile", "aotc.kernels.cpu.custom", "aotc.kernels.cpu.executor.scheduler"} <= loaded
    assert loaded - cache.import_closure(cache.ENTRY).keys() == set()


def imports_by_syntax(source):
    """Names of what a module of this package imports from it, by Python's own parser."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted((ROOT / "aotc").rglob("*.py")), ids=lambda p: p.stem)
def test_imports_are_read_as_python_reads_them(path):
    source = path.read_bytes()
    expected = {pair for pair in imports_by_syntax(source) if re.match(r"aotc\b", pair[0])}
    assert set(cache.imports_in_source(source)) >= expected


def test_every_package_that_decides_is_in_the_key():
    """The others that the closure imports carry messages, or are the references that tests compare with."""
    packages = set()
    for source in cache.import_closure(cache.ENTRY).values():
        packages |= {name.partition(".")[0] for name, _ in imports_by_syntax(source)}
    others = {p for p in packages if p not in sys.stdlib_module_names} - {"aotc"}
    assert others - {"msgpack", "scipy", "cuda"} <= {*cache.PACKAGES["cpu"]}
