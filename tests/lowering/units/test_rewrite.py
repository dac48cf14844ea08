"""Rules on functions: which functions they see, and that nothing is rebuilt where they change nothing."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.rewrite import rewrite_module

pytestmark = pytest.mark.ir
X = np.ones(4, np.float32)


def looped(x):
    return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y) + x, x)


def names_seen(module, names=()):
    seen = []

    def rule(op, b):
        seen.append(op.name)
        return op.operands if op.name == "sin" else None

    return seen, rewrite_module(module, rule, names)


def test_functions_without_the_named_ops_are_skipped():
    module = import_model(looped, X)
    seen, after = names_seen(module, ("cos",))
    assert seen == []
    assert all(after.functions[name] is f for name, f in module.functions.items())


def test_a_rule_sees_only_its_named_ops_in_loops():
    module = import_model(looped, X)
    seen, after = names_seen(module, ("sin",))
    every, whole = names_seen(module)
    assert seen
    assert seen == [name for name in every if name == "sin"]
    for result in (after, whole):
        assert not any(op.name == "sin" for f in result.functions.values() for op in walk(f.body))


def test_unchanged_functions_are_the_same_object():
    module = import_model(looped, X)
    after = rewrite_module(module, lambda op, b: None)
    assert all(after.functions[name] is f for name, f in module.functions.items())
