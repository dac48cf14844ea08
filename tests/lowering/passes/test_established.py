"""What passes establish: a pass that breaks it later is named."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from lowering.test_pass_order import f32, symbolic

from aotc import pipeline
from aotc.diagnostics import InternalError
from aotc.frontend.importer import import_model
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.options import Options
from aotc.pipeline import PASSES, run_passes

pytestmark = pytest.mark.ir


def outlined(module):
    """Make a call of the first public function's body: valid IR, and no module without calls."""
    f = next(f for f in module.functions.values() if f.public)
    inner = replace(f, name="inner", public=False, attrs={})
    results = tuple(Value(f"r{n}", v.type) for n, v in enumerate(f.body.results))
    params = tuple(Value(f"p{n}", v.type) for n, v in enumerate(f.body.params))
    body = Region(params, (Op("call", params, results, {"callee": "inner"}),), results)
    return Module({**module.functions, f.name: replace(f, body=body), "inner": inner})


def one_op(name, attrs):
    """Return a function that puts one op on the first argument into the module."""

    def change(module):
        f = module.functions["main"]
        x = f.body.params[0]
        op = Op(name, (x, x) if name == "dot_general" else (x,), (Value("planted", _type(name, x)),), attrs)
        return module.with_functions({"main": replace(f, body=replace(f.body, ops=(op, *f.body.ops)))})

    return change


def _type(name, x):
    return TensorType("c64", (4, 3)) if name == "fft" else x.type


def without(choose):
    """Return a function that drops the first function that ``choose`` takes."""

    def change(module):
        name = next(f.name for f in module.functions.values() if choose(f))
        return replace(module, functions={n: f for n, f in module.functions.items() if n != name})

    return change


def late_check(module):
    f = module.functions["main"]
    holds = Value("holds", TensorType("i1"))
    check = (Op("constant", (), (holds,), {"value": np.bool_(True)}), Op("assert", (holds,), (), {"message": ""}))
    return module.with_functions({"main": replace(f, body=replace(f.body, ops=(*f.body.ops, *check)))})


def with_weights(module):
    return module.with_functions({"main": replace(module.functions["main"], attrs={"weights": (0,)})})


def kindless(module):
    region = next(f for f in module.functions.values() if not f.public)
    return module.with_functions({region.name: replace(region, attrs={})})


DOT = {"lhs_contract": (1,), "rhs_contract": (0,), "lhs_batch": (), "rhs_batch": ()}
GATHER = {"dim": 0, "groups": ((0,),), "channel": 1, "global_ids": True}
PLANTED = {
    "a call": ("cse", outlined, "call in @main is still there (as inline establishes)"),
    "a product": ("dce", one_op("dot_general", DOT), "dot_general in @main is still there (as canonicalize-dot"),
    "a collective": ("licm", one_op("all_gather", GATHER), "all_gather in @main is still there (as lower-collectives"),
    "a transform": ("cse", one_op("fft", {"kind": "RFFT", "length": (4,)}), "fft in @main is still there"),
    "no copy": ("dce", without(lambda f: f.name == "main_a1_b2"), "@main has 0 copies for a=1, b=2"),
    "no original": ("dce", without(lambda f: f.name == "main"), "is a copy of @main, which does not exist"),
    "no region": ("fuse", without(lambda f: not f.public), "region @k0"),
    "no kind": ("fuse", kindless, "is not a region: it has no kind (as fuse establishes)"),
    "a late check": ("advance_checks", late_check, "sin in @main is before a check that does not need it"),
    "weights": ("dce", with_weights, "@main computes with weights what each call would (as split-weights establishes)"),
    "a loose op": ("fuse", one_op("neg", {}), "neg in @main is in no region"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_pass_that_breaks_a_postcondition_is_named(name, monkeypatch):
    where, change, message = PLANTED[name]
    number = max(n for n, step in enumerate(PASSES) if step.run.__name__ == where)
    step = PASSES[number]

    def run(module, options):
        return change(step.run(module, options))

    run.__name__ = where
    monkeypatch.setattr(pipeline, "PASSES", (*PASSES[:number], replace(step, run=run), *PASSES[number + 1 :]))
    sizes = {"a": (1, 4), "b": (2, 3)} if name in ("no copy", "no original") else {}
    module = import_model(lambda x: jnp.sin(x).sum(), symbolic("a, b") if sizes else f32(4, 4))
    with pytest.raises(InternalError) as caught:
        run_passes(module, Options(verify_each=True, specialize=sizes))
    assert f"in pass {number + 1} {step.name}: the IR after it is wrong: " in str(caught.value)
    assert message in str(caught.value)


def test_a_remaining_call_is_found_by_the_postcondition_only():
    module = import_model(lambda x: jnp.sin(x), f32(4))
    assert verify(outlined(module)) == []


def test_a_function_without_specialized_copies_satisfies_the_postcondition():
    establishes = next(step.establishes for step in PASSES if step.name == "specialize")
    assert establishes(Module({"main": Function("main", Region((), (), ()), True)})) == []
