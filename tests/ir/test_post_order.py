"""The order of ops from their readers back."""

from aotc.ir.tensor.ir import Op, post_order

LEFT, RIGHT, BOTH, LAST = (Op(name, (), ()) for name in ("left", "right", "both", "last"))
NEEDS = {LEFT: [], RIGHT: [], BOTH: [RIGHT, LEFT], LAST: [BOTH, RIGHT]}


def test_post_order_lists_dependences_first():
    assert post_order([LAST], NEEDS.__getitem__) == [RIGHT, LEFT, BOTH, LAST]


def test_post_order_lists_each_op_once():
    assert post_order([LEFT, LAST, BOTH, LEFT], NEEDS.__getitem__) == [LEFT, RIGHT, BOTH, LAST]
    assert post_order([], NEEDS.__getitem__) == []


def test_post_order_of_a_deep_chain_needs_no_recursion():
    ops = [Op("link", (), ()) for _ in range(50_000)]
    before = dict(zip(ops[1:], ops))
    assert post_order(ops[-1:], lambda op: [before[op]] if op in before else []) == ops
