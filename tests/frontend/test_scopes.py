"""Each op and each dispatch is at the user's own line, in the layer that the user named."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.locations import MOST_NODES, loc_from_mlir
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.inline import inline
from aotc.options import Options
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.debug_texts import command_locs
from aotc.vmfb.profile.model_place import model_place, truncate_scope

nn = pytest.importorskip("flax.linen")
nnx = pytest.importorskip("flax.nnx")
X = np.linspace(-1, 1, 4 * 32, dtype=np.float32).reshape(4, 32)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.gelu(nn.Dense(64, name="up")(x))
        return x + nn.Dense(32, name="down")(h)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for n in range(3):
            x = Block(name=f"block_{n}")(x)
        with jax.named_scope("head"):
            return nn.softmax(x)


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.gelu(self.first(x)))


def linen():
    net = Net()
    params = net.init(jax.random.key(0), X)
    return lambda x: net.apply(params, x)


def places(function, *examples, name="dot_general"):
    """The places of the ops called ``name`` in a program without calls, in order."""
    module = inline(import_raw(fetch(function, examples), options=Options()), Options())
    return [model_place(op.loc.traced_by) for op in walk(module.functions["main"].body) if op.name == name]


def line_of(text):
    """The number of the line of this file that has ``text``."""
    with open(__file__) as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


@pytest.mark.parametrize(
    ("loc", "expected"),
    [
        ("jit(f)/Net/block_0/attn/q/dot_general at a.py:7", ("Net/block_0/attn/q", "a.py:7", "")),
        ("jit(f)/transpose(jvp(Net))/b/mul at /x/a.py:7, in /y/z.py:1", ("Net/b", "/x/a.py:7", "/y/z.py:1")),
        ("jit(f)/vmap(jvp(a/b))/jit(relu)/max", ("a/b", "", "")),
        ("jit(f)/Net/while/body/closed_call/step/add", ("Net/step", "", "")),
        ("jit(f)/cond/branch_1_fun/checkpoint/Net/body/add", ("Net/body", "", "")),
        ("jit(f)/att/abc,cde->abde/dot_general", ("att", "", "")),
        ("jit(f)/add", ("", "", "")),
        ("<model>:4:8", ("", "<model>:4:8", "")),
        ("model.mlir:4", ("", "model.mlir:4", "")),
        ("", ("", "", "")),
    ],
)
def test_model_place_parses_locations(loc, expected):
    assert model_place(loc) == expected


def test_short_place_has_the_file_and_line():
    assert model_place("jit(f)/a/add at /home/me/train.py:41").short == "train.py:41"
    assert model_place("jit(f)/a/add").short == "a"
    assert (truncate_scope("a/b/c", 2), truncate_scope("a/b/c", 0), truncate_scope("", 1)) == ("a/b", "a/b/c", "")


def test_linen_ops_have_their_layer_and_source_line():
    found = places(linen(), X)
    assert [p.scope for p in found] == [f"Net/block_{n}/{name}" for n in range(3) for name in ("up", "down")]
    up, down = line_of('name="up"'), line_of('name="down"')
    assert [p.line for p in found] == [f"{__file__}:{up}", f"{__file__}:{down}"] * 3
    assert all("flax" in p.library for p in found)


def test_ops_of_a_function_are_in_the_scope_of_its_call():
    found = places(linen(), X, name="tanh")  # of jax.nn.gelu, a function of its own in each model
    assert [p.scope for p in found] == ["Net/block_0", "Net/block_1", "Net/block_2"]
    assert {p.line for p in found} == {f"{__file__}:{line_of('nn.gelu(nn')}"}


def test_ops_of_a_scan_are_in_the_scope_around_it():
    def scanned(x):
        def step(carry, _):
            with jax.named_scope("inner"):
                return jnp.sin(carry), None

        with jax.named_scope("outer"):
            return jax.lax.scan(step, x, None, length=3)[0]

    (found,) = places(scanned, X, name="sin")
    assert found.scope == "outer/inner"
    assert found.line == f"{__file__}:{line_of('jnp.sin(carry)')}"


def test_layers_of_gradients_are_those_of_the_model():
    net = linen()
    found = places(jax.grad(lambda x: net(x).sum()), X)
    assert {p.scope for p in found} == {f"Net/block_{n}/{name}" for n in range(3) for name in ("up", "down")}


def test_nnx_ops_have_the_class_of_their_layer():
    pair = Pair(nnx.Rngs(0))
    found = places(lambda x: pair(x), X)
    assert [p.scope for p in found] == ["Pair/Linear"] * 2
    assert {p.line for p in found} == {f"{__file__}:{line_of('self.second(nnx')}"}


def test_classes_around_the_traced_function_are_not_layers():
    class Runner:
        def __call__(self, x):
            return places(jnp.sin, x, name="sin")

    assert [p.scope for p in Runner()(X)] == [""]


def test_a_recursive_location_terminates():
    from jaxlib.mlir import ir

    with ir.Context():
        location = ir.Location.file("a.py", 1, 1)
        for _ in range(60):
            location = ir.Location.callsite(location, [location])
        assert loc_from_mlir(location, "").source == "a.py:1"
    assert MOST_NODES < 1000


def test_layers_that_share_a_kernel_have_their_own_locations():
    data = aotc.compile(linen(), X)
    module = aotc.load(data)
    record = module.profile("main", X, repeat=1)
    scopes = [model_place(loc).scope for row in record["kernels"] for loc in row["places"]]
    assert {f"Net/block_{n}/up" for n in range(3)} <= set(scopes)
    assert any(len(row["places"]) > 1 for row in record["kernels"])
    assert all(sum(row["places"].values()) == row["runs"] for row in record["kernels"])
    with module.profile() as recording:
        module(X)
    made = [model_place(d.loc).scope for d in recording.dispatches]
    assert [s for s in made if s.endswith("/up")] == [f"Net/block_{n}/up" for n in range(3)]


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": 1}', '{"cpu": {"locs": [], "buffers": [[5]]}}'])
def test_damaged_locations_are_a_bundle_error(text):
    opened = open_bundle(aotc.compile(lambda x: x + 1, X))
    variant = opened.manifest["variants"][0]
    debug = {**opened.manifest["debug"], "places": text.replace("cpu", variant["target"])}
    damaged = SimpleNamespace(where="m.vmfb", manifest={"debug": debug})
    module = aotc.load(aotc.compile(lambda x: x + 1, X))
    with pytest.raises(BundleError, match="locations"):
        command_locs(damaged, variant, 0, module.get_function("main").executable.buffers.nodes[0])
    assert json.loads(opened.manifest["debug"]["places"])
