"""Passes that leave a region as it is still change what it reads; what is known in one is not known in the next."""

from aotc.ir.tensor.ir import Op, walk
from aotc.ir.tensor.text import parse_module
from aotc.lowering.passes.cse import cse
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.licm import licm
from aotc.lowering.passes.rewrite import rewrite_module
from aotc.options import Options

BRANCHES = """
module @main {
  func public @main(%x: f32[4], %i: i32[]) {
    %a = exp %x : f32[4]
    %0 = case %i : f32[4] {
      region() {
        %b = neg %x : f32[4]
        %c = exp %x : f32[4]
        %d = add %b, %c : f32[4]
        yield %d
      }
      region() {
        %e = neg %x : f32[4]
        yield %e
      }
    }
    %f = neg %x : f32[4]
    %g = add %0, %f : f32[4]
    %h = add %g, %a : f32[4]
    return %h
  }
}
"""
CALL = """
module @main {
  func public @main(%x: f32[4], %i: i32[]) {
    %a = call %x {callee = "f"} : f32[4]
    %0 = case %i : f32[4] {
      region() {
        %b = neg %a : f32[4]
        yield %b
      }
      region() {
        yield %x
      }
    }
    return %0
  }
  func @f(%y: f32[4]) {
    %z = exp %y : f32[4]
    return %z
  }
}
"""


def body(module):
    return module.functions["main"].body


def test_cse_does_not_reuse_values_of_another_branch():
    module = cse(parse_module(BRANCHES), Options())
    assert [op.name for op in walk(body(module))] == ["exp", "case", "neg", "add", "neg", "neg", "add", "add"]
    first, branches = body(module).ops[:2]
    (added,) = (op for op in branches.regions[0].ops if op.name == "add")
    assert added.operands[1] is first.result


def test_passes_without_changes_return_the_same_bodies():
    module = cse(parse_module(BRANCHES), Options())
    for run in (cse, dce, licm, inline):
        assert body(run(module, Options())) is body(module), run.__name__


def test_rules_see_only_named_ops_and_regions_use_replaced_values():
    seen = []

    def twice(op: Op, b):
        seen.append(op.name)
        return (b.make("mul", (op.operands[0], op.operands[0])),)

    module = rewrite_module(inline(parse_module(CALL), Options()), twice, ("exp",))
    assert seen == ["exp"]
    product, branches = body(module).ops
    assert branches.regions[0].ops[0].operands == (product.result,)
    assert branches.regions[1] is not branches.regions[0]
    assert branches.regions[1].results == body(module).params[:1]


def test_regions_read_the_results_of_inlined_calls():
    exp, branches = body(inline(parse_module(CALL), Options())).ops
    assert exp.name == "exp"
    assert branches.regions[0].ops[0].operands == (exp.result,)
