"""The order of ops from their readers back."""

from aotc.ir.tensor.ir import Op, post_order

LEFT, RIGHT, BOTH, LAST = (Op(name, (), ()) for name in ("left", "right", "both", "last"))
NEEDS = {LEFT: [], RIGHT: [], BOTH: [RIGHT, LEFT], LAST: [BOTH, RIGHT]}


def test_needs_come_first_as_they_are_listed():
    assert post_order([LAST], NEEDS.__getitem__) == [RIGHT, LEFT, BOTH, LAST]


def test_each_op_comes_once_from_any_roots():
    assert post_order([LEFT, LAST, BOTH, LEFT], NEEDS.__getitem__) == [LEFT, RIGHT, BOTH, LAST]
    assert post_order([], NEEDS.__getitem__) == []


def test_a_chain_may_be_deeper_than_recursion():
    ops = [Op("link", (), ()) for _ in range(50_000)]
    before = dict(zip(ops[1:], ops))
    assert post_order(ops[-1:], lambda op: [before[op]] if op in before else []) == ops
