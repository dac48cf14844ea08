"""Values that nobody should give: of every option, variable and argument, refused with a sentence of ours."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import tiny

import aotc
from aotc import BundleError, CallError, CompileError
from aotc_cli import main

pytestmark = pytest.mark.ir

X = np.ones(3, "f4")
MODEL = "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {\n return %x : tensor<4xf32>\n}"
LONG = "9" * 5000


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run the command line in a folder with a bundle and a model; return what it says when it refuses."""
    (tmp_path / "t.vmfb").write_bytes(tiny.bundle())
    (tmp_path / "m.mlir").write_text(MODEL)
    (tmp_path / "junk").write_bytes(b"\xff\xfe\x00junk")
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["aotc", *words])
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = capsys.readouterr().err
        assert ended.value.code in (1, 2), said
        assert "Traceback" not in said
        assert "internal error" not in said
        return said

    return call


HUGE = ["99999999999999999999xf32", "100000000000x100000000000xf32", "100000000000x100000000000xf32=1", f"{LONG}xf32",
        "1x" * 100 + "f32", "1x" * 100 + "f32=1", "99999999999999999999xf32=@junk"]  # fmt: skip


@pytest.mark.parametrize("text", HUGE, ids=lambda text: text[:12])
@pytest.mark.parametrize("option", ["--input", "--expected_output"])
def test_too_large_arrays_are_refused(refused, text, option):
    assert "no array is so large" in refused("run", "t.vmfb", "--zeros", f"{option}={text}")


@pytest.mark.parametrize(
    "text", ["4xf32=@", "4xf32=@nope", "4xf32=@.", "4xf32=@junk", "@", "@.", "@junk", "@\udcff", "", "=", "4x",
             "²xf32", "4xf32=0x" + "f" * 5000, "4xf32=[[)", "4xi32=1.5", "4xi128=1"]
)  # fmt: skip
def test_unreadable_inputs_are_refused(refused, text):
    assert "input" in refused("run", "t.vmfb", f"--input={text}")


@pytest.mark.parametrize("size", ["99999999999999999999", LONG, "²", "-1", "", "9223372036854775807"])
@pytest.mark.parametrize("made", ["--zeros", "--random"])
def test_invalid_sizes_of_dims_are_refused(refused, size, made):
    refused("run", "t.vmfb", "--function=grow", made, f"--dim=n={size}")


@pytest.mark.parametrize(
    "words",
    [
        ("--output=@",), ("--output=+",), ("--output=/nope/x",), ("--output=@.",), ("--output=" + "x" * 300,),
        ("--expected_output=",), ("--threads=99999999999999999999",), ("--threads=1e20",), ("--threads=1000000",),
        ("--device=\udcff",), ("--function=\udcff",),
        ("--function=__class__",), ("--trace-dispatch-tensors=/dev/null/x",), ("--custom-calls=.",),
        ("--custom-calls=\udcff",),
    ],
    ids=lambda words: words[0][:20].encode(errors="replace").decode(),
)  # fmt: skip
def test_invalid_options_of_run_are_refused(refused, words):
    refused("run", "t.vmfb", "--zeros", *words)


@pytest.mark.parametrize(
    "words",
    [
        ("--jobs=99999999999",), ("--target=",), ("--target=,",), (f"--specialize=b={LONG}",), ("--specialize=b=²",),
        ("--specialize==1",), ("--weights=/nope/a.safetensors",), ("--print-after=\udcff",), ("--dump-ir=/dev/null/x",),
        ("-o", ""), ("-o", "m.mlir/x"), ("-o", "x" * 300),
    ],
    ids=lambda words: words[-1][:20].encode(errors="replace").decode(),
)  # fmt: skip
def test_invalid_options_of_compile_are_refused(refused, words):
    if words == ("--weights=/nope/a.safetensors",):  # a model without constants writes no weights
        words = ("--weights=/nope/a.txt",)
    refused("compile", "m.mlir", "-o", "o.vmfb", *words)


@pytest.mark.parametrize("command", ["run", "inspect", "dump", "verify", "bench", "lint", "check", "explain affinity"])
@pytest.mark.parametrize("file", ["junk", "nope", ".", "/dev/null", "\udcff", "x" * 300, ""])
def test_every_command_refuses_unreadable_files(refused, command, file):
    refused(*command.split(), file)


def test_errors_without_a_location_begin_with_error(refused):
    told = refused("run", "t.vmfb", "--threads=0")
    assert told.startswith("error: threads must be an integer from 1 to")


# ---------------------------------------------------------------- variables, and arguments of the API


@pytest.mark.parametrize("text", ["1e20", "10000000000000000000000", "0", "-1", "²", "٣", " 4", LONG, "1000000"])
def test_invalid_numbers_of_threads_are_refused(monkeypatch, text):
    data = tiny.bundle()
    with pytest.raises(CallError, match="threads must be an integer from 1 to"):
        aotc.load(data, threads=text)
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    assert aotc.load(data).stats()["threads"] >= 1  # another library's variable
    monkeypatch.setenv("AOTC_NUM_THREADS", text)
    with pytest.raises(CallError, match="AOTC_NUM_THREADS must be an integer from 1 to"):
        aotc.load(data)


@pytest.mark.parametrize("threads", [1e20, 10**20, 3.0, True, float("nan"), [], object()])
def test_threads_of_wrong_types_are_refused(threads):
    with pytest.raises(CallError, match="threads must be an integer from 1 to"):
        aotc.load(tiny.bundle(), threads=threads)


class Evil:
    """Nothing can be asked of it."""

    def __getattr__(self, name):
        raise RuntimeError(f"evil {name}")


class EvilMap(dict):
    def __contains__(self, key):
        raise RuntimeError("evil contains")


class EvilList(list):
    def __len__(self):
        raise RuntimeError("evil len")


class Unwilling:
    pass


def unwilling(_):
    raise RuntimeError("no flatten")


jax.tree_util.register_pytree_node(Unwilling, unwilling, lambda aux, children: Unwilling())


def cycle():
    found = []
    found.append(found)
    return found


def deep():
    found = X
    for _ in range(100_000):
        found = [found]
    return found


NEITHER = {"none": None, "number": 3, "list": [], "dict": {}, "evil": Evil(), "object": object(), "null": "\0",
           "surrogate": "\ud800", "missing": "nope", "folder": "/"}  # fmt: skip


@pytest.mark.parametrize("name", NEITHER)
def test_compile_refuses_files_that_are_not_models(name):
    with pytest.raises(CompileError):
        aotc.compile(NEITHER[name])


@pytest.mark.parametrize("name", NEITHER)
def test_load_refuses_files_that_are_not_bundles(name):
    with pytest.raises(BundleError):
        aotc.load(NEITHER[name])


def test_load_refuses_none():
    with pytest.raises(BundleError, match="this is not a bundle\n    found:    NoneType\n    expected: a path"):
        aotc.load(None)


ODD = {"cycle": cycle, "deep": deep, "evil": Evil, "unwilling": Unwilling, "mixed keys": lambda: {1: X, "a": X},
       "object": object, "text": lambda: "abc", "type": lambda: int, "set": lambda: {1, 2}, "huge": lambda: 10**30,
       "objects": lambda: np.array([object()]), "times": lambda: np.array(["2020"], "M8[D]"),
       "negative": lambda: jax.ShapeDtypeStruct((-1,), "f4"), "no size": lambda: jax.ShapeDtypeStruct((10**30,), "f4"),
       "no memory": lambda: jax.ShapeDtypeStruct((1 << 31, 1 << 31), "f4")}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("jitted", [False, True])
def test_unusable_example_arguments_are_refused(name, jitted):
    def function(d):
        return jax.tree.leaves(d)[0] + 1

    with pytest.raises(CompileError) as caught:
        aotc.compile(jax.jit(function) if jitted else function, ODD[name]())
    assert "nanobind" not in str(caught.value)


@pytest.mark.parametrize("make", [object, lambda: "a", cycle, deep, Evil])
def test_unsupported_results_are_refused(make):
    with pytest.raises(CompileError):
        aotc.compile(lambda x: make(), X)


@pytest.fixture(scope="module")
def of_a_tree():
    """A module whose argument is a tree."""
    return aotc.load(aotc.compile(lambda d: d["a"][0] + d["b"], {"a": (X, X), "b": X}))


TREES = {"cycle": cycle, "deep": deep, "evil": Evil, "keys": lambda: EvilMap(a=X, b=X), "none": lambda: None,
         "length": lambda: {"a": EvilList([X]), "b": X}, "mixed": lambda: {1: X, "q": X},
         "leaf": lambda: {"a": (X, Evil()), "b": X}, "other": lambda: {"a": (X, X), "b": cycle()},
         "key": lambda: {Evil(): 1, 2: 3}}  # fmt: skip


@pytest.mark.cpu
@pytest.mark.parametrize("name", TREES)
def test_unsupported_pytree_arguments_are_refused(of_a_tree, name):
    with pytest.raises(CallError):
        of_a_tree(TREES[name]())


@pytest.mark.cpu
def test_results_beyond_the_address_space_are_refused():
    b = jax.export.symbolic_shape("b")[0]
    module = aotc.load(aotc.compile(lambda x: jnp.zeros([x.shape[0]] * 8) + 1, jax.ShapeDtypeStruct((b,), "f4")))
    assert module(np.ones(2, "f4")).shape == (2,) * 8
    with pytest.raises(CallError, match=r"need more memory than there are addresses\n    found:    4,"):
        module(np.ones(1000, "f4"))


@pytest.mark.parametrize("name", ["dump_ir", "weights"])
def test_paths_with_null_characters_are_refused(name):
    with pytest.raises(CompileError, match=f"{name} is (.|\n)*a path, which has no null"):
        aotc.compile(MODEL, **{name: "a\0.safetensors"})
