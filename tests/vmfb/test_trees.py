"""Pytrees of arguments and results: the tiny bundle made by hand, and nodes alone."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from aotc.vmfb import trees
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir

X = np.arange(4, dtype=np.float32)
Y = np.full(4, 10, np.float32)
LEAF = {"kind": "leaf"}


def tuple_of(*children, **more):
    return {"kind": "tuple", "children": list(children), **more}


def test_pytrees_in_and_out():
    manifest, segments = tiny.parts()
    arguments = {"kind": "dict", "keys": ["a", "b"], "children": [LEAF, {"kind": "list", "children": [LEAF]}]}
    out = {"kind": "namedtuple", "name": "Out", "keys": ["sum", "rest"], "children": [LEAF, {"kind": "none"}]}
    no_names = {"kind": "dict", "keys": [], "children": []}
    manifest["functions"]["main"].update(in_tree=tuple_of(tuple_of(arguments), no_names), out_tree=out)
    module = load(write_bundle(None, manifest, segments))
    found = module({"b": [Y], "a": X})
    assert found.rest is None
    assert found.sum.tolist() == [10, 11, 12, 13]
    assert type(found).__name__ == "Out"
    for wrong in ({"a": X}, {"a": X, "b": [Y, Y]}, {"a": X, "b": Y}, [X, Y]):
        with pytest.raises(CallError, match="another structure"):
            module(wrong)


def test_trees_round_trip():
    Point = namedtuple("Point", "x y")
    node = tuple_of(
        {"kind": "namedtuple", "name": "Point", "keys": ["x", "y"], "children": [LEAF, {"kind": "none"}]},
        {"kind": "dict", "keys": ["k"], "children": [{"kind": "list", "children": [LEAF, LEAF]}]},
    )
    value = (Point(1, None), {"k": [2, 3]})
    leaves = []
    trees.make_flattener(node, "f", "x")(value, leaves)
    assert leaves == [1, 2, 3]
    assert trees.count_leaves(node) == 3
    assert trees.make_unflattener(node)(iter(leaves)) == value


STATE = {"kind": "object", "name": "State", "keys": ["w", "step"], "children": [LEAF, tuple_of()]}


@pytest.mark.parametrize("value", [SimpleNamespace(w=7, step=(), more=1), (7, ()), {"step": (), "w": 7}])
def test_an_object_by_its_attributes(value):
    leaves = []
    trees.make_flattener(STATE, "f", "x")(value, leaves)
    assert leaves == [7]
    found = trees.make_unflattener(STATE)(iter(leaves))
    assert (type(found).__name__, found.w, found.step, found) == ("State", 7, (), (7, ()))


def test_an_object_without_an_attribute():
    with pytest.raises(CallError, match=r"argument s\.inner has another structure") as error:
        trees.make_flattener(STATE, "f", "s.inner")(SimpleNamespace(w=7), [])
    assert "a SimpleNamespace without step" in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [{"keys": ["w", "w"]}, {"keys": ["w", "2"]}, {"keys": ["w"]}, {"name": "a b"}, {"name": 3}, {"kind": "bag"}],
)
def test_nodes_that_are_not_well_formed(wrong):
    with pytest.raises(ValueError, match=r"pytree node|keys"):
        trees.count_leaves({**STATE, **wrong})


def test_a_tree_that_does_not_fit_its_function():
    manifest, segments = tiny.parts()
    manifest["functions"]["main"]["out_tree"] = tuple_of(LEAF, LEAF)
    with pytest.raises(BundleError, match="out_tree of function 'main'"):
        load(write_bundle(None, manifest, segments))
