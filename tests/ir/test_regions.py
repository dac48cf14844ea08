"""What a region knows of itself, and what is the same object where nothing changes."""

import pytest

from aotc.ir.tensor.ir import Module, Op, captured_values, reads_no_values_of, replaced_values, use_counts, walk
from aotc.ir.tensor.text import parse_module

TEXT = """
module @main {
  func public @main(%x: f32[4], %n: i32[]) {
    %a = exp %x : f32[4]
    %0 = while %n : i32[] {
      region(%i: i32[]) {
        %t = lt %i, %n : i1[]
        yield %t
      }
      region(%j: i32[]) {
        %k = case %j : i32[] {
          region() {
            %m = add %j, %n : i32[]
            yield %m
          }
          region() {
            yield %n
          }
        }
        yield %k
      }
    }
    %b = neg %a : f32[4]
    return %b, %0
  }
}
"""


@pytest.fixture
def body():
    return parse_module(TEXT).functions["main"].body


def test_region_names_include_nested_ops(body):
    assert body.names == {"exp", "while", "lt", "case", "add", "neg"} == {op.name for op in walk(body)}
    loop = next(op for op in body.ops if op.name == "while")
    assert [r.names for r in loop.regions] == [{"lt"}, {"case", "add"}]
    assert body.names is body.names
    module = Module({"main": parse_module(TEXT).functions["main"]})
    assert module.has("sub", "add")
    assert not module.has("sub")


def test_walk_visits_nested_regions_in_order(body):
    assert [op.name for op in walk(body)] == ["exp", "while", "lt", "case", "add", "neg"]


def test_captured_values_are_in_order_of_first_use(body):
    x, n = body.params
    loop = body.ops[1]
    assert captured_values(body) == ()
    assert captured_values(loop.regions[0]) == (n,)
    inner = loop.regions[1].ops[0]
    (j,) = loop.regions[1].params
    assert captured_values(inner.regions[0]) == (j, n)
    assert captured_values(inner.regions[1]) == (n,)
    assert captured_values(loop.regions[1]) is captured_values(loop.regions[1]) == (n,)
    assert reads_no_values_of(loop.regions[1], {x: n})
    assert not reads_no_values_of(loop.regions[1], {n: x})


def test_use_counts_include_nested_regions_and_results(body):
    x, n = body.params
    counts = use_counts(body)
    assert counts[x] == 1
    assert counts[n] == 4
    assert counts[body.ops[0].result] == 1
    assert next(iter(counts)) is x


def test_unchanged_ops_and_regions_are_the_same_object(body):
    x, n = body.params
    a, loop, b = body.ops
    assert a.on((x,), ()) is a
    assert loop.on(loop.operands, loop.regions) is loop
    assert a.on((n,), ()) is not a
    assert a.on((n,), ()).result is a.result
    assert body.with_ops(list(body.ops), body.results) is body
    assert body.with_ops([a, b], (b.result,)).ops == (a, b)
    function = parse_module(TEXT).functions["main"]
    assert function.with_body(function.body) is function
    assert function.with_body(body).body is body
    module = parse_module(TEXT)
    own = module.functions["main"]
    assert module.with_functions({}) is module.with_functions({"main": own}) is module
    assert module.with_functions({"main": function}).functions["main"] is function
    assert [*module.with_functions({"other": own}).functions] == ["main", "other"]
    assert replaced_values((x, n), {}) == (x, n) == replaced_values((x, n), {a.result: x})
    assert replaced_values((x, n), {n: a.result}) == (x, a.result)


def test_an_op_without_results_keeps_its_name():
    assert Op("fail", (), ()).on((), ()).name == "fail"
