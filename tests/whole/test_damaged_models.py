"""Models that crash MLIR's readers: the process that compiles them stays alive, and says which model it was."""

import os
import random
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir

import aotc
from aotc import CompileError
from aotc.frontend import mlir
from aotc.frontend.contexts import make_context
from aotc.frontend.mlir import fetch
from aotc.frontend.mlir_types import module_bytes
from aotc.frontend.model_text import check_braces
from aotc.source import reader_process

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


@jax.jit
def model(x):
    return jax.nn.softmax(x @ jnp.ones((4, 8))), jnp.sort(x, 0)


@pytest.fixture(scope="module")
def blob():
    return bytes(jax.export.export(model)(np.zeros((2, 4), "f4")).serialize())


def flipped(data, seed):
    """Return ``data`` with one to three bytes changed."""
    chosen, found = random.Random(seed), bytearray(data)
    for _ in range(chosen.randrange(1, 4)):
        found[chosen.randrange(len(found))] ^= chosen.randrange(1, 256)
    return bytes(found)


def survives(blob, form, seeds):
    """Compile mutations of a model: each is an error, or a model."""
    data = fetch(blob).data if form == "bytecode" else blob
    for seed in seeds:
        with suppress(CompileError):
            aotc.compile(flipped(data, seed), cache=False)


@pytest.mark.parametrize("form", ["bytecode", "blob"])
def test_damaged_models_are_compile_errors(blob, form):
    """A tenth of them end the process that reads them."""
    survives(blob, form, range(16))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(16, 1500, 212))
@pytest.mark.parametrize("form", ["bytecode", "blob"])
def test_many_damaged_models_are_compile_errors(blob, form, first):
    survives(blob, form, range(first, first + 212))


def test_a_file_that_crashes_the_reader_is_named(blob, tmp_path):
    data = fetch(blob).data
    found = next(d for d in (flipped(data, seed) for seed in range(999)) if reader_process.read_in_child(d).problem)
    path = tmp_path / "net.mlirbc"
    path.write_bytes(found)
    with pytest.raises(CompileError, match=r"net.mlirbc: error: the model cannot be read: MLIR crashes"):
        aotc.compile(path)
    aotc.compile(data)  # the next model has a new child


def test_the_compiler_parses_only_bytecode_that_the_child_wrote(blob, monkeypatch):
    """Damage that MLIR's reader survives may corrupt memory: of the file's own bytes none are parsed here."""
    data = fetch(blob).data
    raw = fetch(data)
    assert raw.data == data
    assert raw.code == raw.rewritten != data
    parse, seen = ir.Module.parse, []
    monkeypatch.setattr(mlir.ir.Module, "parse", lambda code: seen.append(code) or parse(code))
    aotc.compile(data, cache=False)
    for seed in range(40):
        with suppress(CompileError):
            fetch(flipped(data, seed))
    assert seen
    assert all(isinstance(code, str) or len(code) < 100 or code == raw.rewritten for code in seen)


def test_a_refusal_by_the_child_has_a_reason_and_a_hint():
    with pytest.raises(CompileError, match=r"^error: bytecode version \d+ is newer .*\n.*this file may be damaged"):
        aotc.compile(b"ML\xefRbroken")


REDUCE = """%y = "stablehlo.all_reduce"(%x) ({^bb0(%a: tensor<f32>, %b: tensor<f32>):
%s = stablehlo.add %a, %b : tensor<f32> stablehlo.return %s : tensor<f32>
}) {replica_groups = dense<> : tensor<0x0xi64>} : (tensor<2xf32>) -> tensor<2xf32>"""


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ('mhlo.num_partitions = "a"', 'mhlo.num_partitions is "a", expected an integer'),
        ("mhlo.num_partitions = 1.0 : f32", "mhlo.num_partitions is 1.000000e+00 : f32, expected an integer"),
        ("mhlo.num_replicas = @main", "mhlo.num_replicas is @main, expected an integer"),
        ("mhlo.num_replicas = 1000000000000 : i64", "mhlo.num_replicas is 1000000000000, expected at most"),
        ('tf.aliasing_output = "a"', 'tf.aliasing_output is "a", expected an integer'),
        ("jax.global_constant = 3 : i32", ""),
        ("jax.result_info = 3 : i32", ""),
        ("mhlo.memory_kind = 3 : i32", ""),
    ],
)
def test_attributes_of_the_wrong_kind_are_refused_or_ignored(attribute, message):
    """MLIR does not verify discardable attributes: a damaged model may have any."""
    of_module, of_argument = (attribute, "") if ".num_" in attribute else ("", f" {{{attribute}}}")
    body = f"{{ {REDUCE} return %y : tensor<2xf32> }}"
    function = f"func.func @main(%x: tensor<2xf32>{of_argument}) -> tensor<2xf32> {body}"
    text = f"module attributes {{{of_module}}} {{ {function} }}"
    if not message:
        x = np.ones(2, np.float32)
        np.testing.assert_array_equal(aotc.load(aotc.compile(text))(x), x)
        return
    with pytest.raises(CompileError, match=re.escape(message)):
        aotc.compile(text)


@pytest.mark.parametrize("kept", [(0, 7), (2, 0), (0, 0), (-1, 0)])
def test_an_export_that_reads_no_argument_of_its_tree_is_refused(kept):
    spec = jax.ShapeDtypeStruct((3,), jnp.float32)
    exported = jax.export.export(jax.jit(lambda x, y, z: x + z))(spec, spec, spec)
    with pytest.raises(CompileError, match="the export is of 3 arrays, and its module reads those numbered"):
        aotc.compile(replace(exported, module_kept_var_idx=kept))


def test_bytecode_for_several_devices_is_refused_as_text_is():
    function = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
    text = f"module attributes {{mhlo.num_partitions = 2 : i32}} {{ {function} }}"
    with make_context():
        module = ir.Module.parse(text)
        with pytest.raises(CompileError, match="it is for 2") as caught:
            aotc.compile(module_bytes(module))
    assert "shardings of arguments or results" in str(caught.value)


def test_an_export_with_an_invalid_argument_tree_is_refused():
    exported = jax.export.export(model)(np.zeros((2, 4), "f4"))
    damaged = replace(exported, in_tree=jax.tree.structure(0))
    with pytest.raises(CompileError, match=r"the blob of jax.export contradicts itself: IndexError"):
        aotc.compile(bytes(damaged.serialize()))


def chain(count):
    """Return the text of a function of ``count`` ops, with brackets in comments and strings."""
    op = '  %{} = "stablehlo.abs"(%{}) {{a = "((("}} : (tensor<2xf32>) -> tensor<2xf32> // (((\n'
    ops = "".join(op.format(n, n - 1) for n in range(1, count))
    return f"func.func @main(%0: tensor<2xf32>) -> tensor<2xf32> {{\n{ops} return %{count - 1} : tensor<2xf32>\n}}\n"


def test_a_model_from_a_pipe_is_read_completely(blob, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(blob,))
    writer.start()
    assert aotc.compile(pipe, cache=False).startswith(b"AOTCVMFB")
    writer.join(60)


def test_a_child_that_cannot_start_is_a_compile_error(blob, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(11, "Resource temporarily unavailable")

    data = fetch(blob).data
    reader_process._close_child_pipes()
    monkeypatch.setattr(reader_process.subprocess, "Popen", refuse)
    with pytest.raises(CompileError, match="starts no process to read it in: Resource temporarily unavailable"):
        aotc.compile(data)


def test_a_model_beyond_the_memory_or_time_limit_is_refused(blob):
    data = chain(20_000).encode()
    assert "more than 4 MB" in reader_process.read_in_child(data, memory=4 << 20).problem
    assert reader_process.read_in_child(data, seconds=0).problem == "reading it takes longer than 0 s"
    read = reader_process.read_in_child(fetch(blob).data, memory=1 << 30, rewrite=True)
    assert read.problem == ""
    assert read.module.startswith(b"ML\xefR")


ENDLESS = """
from aotc.frontend import child_reader
def endless(*arguments, **options):
    while True: pass
child_reader.import_raw = endless
child_reader.serve_read_requests(60)
"""


def test_a_model_whose_reading_does_not_end_is_refused(blob, monkeypatch):
    data = fetch(blob).data
    assert reader_process.reader_cpu_seconds(len(data)) < 60
    assert reader_process.reader_cpu_seconds(1 << 30) >= reader_process.READER_SECONDS
    reader_process._close_child_pipes()
    with monkeypatch.context() as patch:
        patch.setattr(reader_process, "_START", ENDLESS)
        patch.setattr(reader_process, "READER_CPU_SECONDS", 0)  # rounded up to the next second
        message = rf"read: reading its {len(data):,} bytes takes longer than \d s of processor time\n.*may be damaged"
        with pytest.raises(CompileError, match=message):
            aotc.compile(data)


def test_the_processor_time_limit_applies_to_each_model(blob, monkeypatch):
    data = fetch(blob).data
    monkeypatch.setattr(reader_process, "READER_CPU_SECONDS", 1)
    end = time.monotonic() + 1.6  # long enough for the child to exceed a limit for all models together
    while time.monotonic() < end:
        assert reader_process.read_in_child(data).problem == ""


def test_the_child_restarts_after_it_was_idle(blob, monkeypatch):
    monkeypatch.setattr(reader_process, "_START", reader_process._START.replace("requests(60)", "requests(0.1)"))
    reader_process._close_child_pipes()
    data = fetch(blob).data  # reads it
    child = reader_process._READERS[0]._process
    assert child.wait(60) == 0
    assert reader_process.read_in_child(data).problem == ""
    assert reader_process._READERS[0]._process is not child
    reader_process._close_child_pipes()


FORKED = """
import os, sys, aotc
from aotc.source import reader_process
data = open(sys.argv[1], "rb").read()
first = aotc.compile(data, cache=False)
if pid := os.fork():
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert aotc.compile(data, cache=False) == first
else:
    assert not reader_process._READERS
    os._exit(0 if reader_process.read_in_child(b"func.func @f() {return}").problem == "" else 1)
"""


def test_a_forked_process_has_its_own_child(blob, tmp_path):
    (tmp_path / "m").write_bytes(blob)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", FORKED, tmp_path / "m"], env=environment, check=True, timeout=300)


@pytest.mark.parametrize(
    "text",
    [
        "func.func @main(%x: " + "tuple<" * 20_000,
        "module attributes {a = " + "[" * 20_000,
        "func.func @main(%x: " + "(" * 20_000,
        "module attributes {a = " + "{a = " * 20_000,
        "#m = affine_map<(d0) -> (" + "-" * 20_000 + "d0)>",
        'module attributes {a = ">>>", b = ' + '[">", ' * 20_000,
        "module { // \"\n func.func @main(%x: " + "tuple<" * 20_000,
    ],
)  # fmt: skip
def test_too_deeply_nested_text_is_refused(text):
    with pytest.raises(CompileError, match=r"^<model>:\d+: error: the model's text is nested more than 1000 deep"):
        aotc.compile(text + "\n{")


EXCHANGE = """#g = dense<> : tensor<GROUPSxi64>
func.func @main(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %y = "stablehlo.all_to_all"(%x) {split_dimension = 1 : i64, concat_dimension = 0 : i64, split_count = 1 : i64,
    replica_groups = #g} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %y : tensor<4x4xf32>
}
"""
CONVOLUTION = """func.func @main(%a: tensor<3x4x5xi32>, %b: tensor<4x3x2xi32>) -> tensor<2x4x4xi32> {
  %y = stablehlo.convolution(%a, %b) dim_numbers = [f, b, 0]x[o, i, 0]->[b, SPATIAL, f], window = {}
    {batch_group_count = 2 : i64, feature_group_count = 1 : i64}
    : (tensor<3x4x5xi32>, tensor<4x3x2xi32>) -> tensor<2x4x4xi32>
  return %y : tensor<2x4x4xi32>
}
"""


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        (EXCHANGE.replace("GROUPS", "0x0"), 3, "crashes when it reads it .Floating point exception"),
        (EXCHANGE.replace("GROUPS", "0 x 1"), 3, "crashes when it reads it .Floating point exception"),
        (EXCHANGE.replace("GROUPS", "0x1").replace("all_to", r"all\5Fto"), 3, "crashes when it reads it .Floating"),
        (CONVOLUTION.replace("SPATIAL", "2147483647"), 2, "needs more than 1,024 MB"),
        (CONVOLUTION.replace("SPATIAL", "0x7FFFFFFE"), 2, "needs more than 1,024 MB"),
    ],
)
@pytest.mark.parametrize("form", ["text", "bytes", "file"])
def test_text_that_crashes_the_verifier_is_refused(text, line, problem, form, tmp_path):
    """Text is parsed in the caller's process: what divides by zero or allocates gigabytes there goes to the child."""
    path = tmp_path / "net.mlir"
    path.write_text(text)
    model = {"text": text, "bytes": text.encode(), "file": path}[form]
    where = path.name if form == "file" else "<model>"
    with pytest.raises(CompileError, match=rf"{where}:{line}: error: the model cannot be read: .*{problem}"):
        aotc.compile(model)


def test_a_collective_with_a_group_is_read():
    text = EXCHANGE.replace("GROUPS", "1x1").replace("dense<>", "dense<0>")
    x = np.arange(16, dtype="f4").reshape(4, 4)
    np.testing.assert_array_equal(aotc.load(aotc.compile(text))(x), x)


def test_checking_unnested_brackets_is_fast():
    text = chain(20_000)
    start = time.process_time()
    check_braces(text, "")
    assert time.process_time() - start < 0.5
