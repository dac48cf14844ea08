"""A store of a maximum is no atomic one: only its name says so."""

import pytest

from aotc.ir.loop.ir import Store, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel

pytestmark = pytest.mark.ir

TEXT = """def k(a0: "i32[32]", /, o0: "i32[32]", *, grid: "1"):
    for i0 in range(0, 32):
        o0[i0] = {call}
"""


@pytest.mark.parametrize(
    ("call", "reduce", "atomic"),
    [
        ("max(o0[i0], a0[i0])", "", False), ("reduce_max(o0[i0], a0[i0])", "max", False),
        ("atomic_max(o0[i0], a0[i0])", "max", True),
    ],
)  # fmt: skip
def test_reductions_and_atomics_of_a_store_parse_from_its_name(call, reduce, atomic):
    kernel = parse_kernel(TEXT.format(call=call))
    (store,) = (s for s in walk(kernel.body) if isinstance(s, Store))
    assert (store.reduce, store.atomic) == (reduce, atomic)
    assert parse_kernel(print_kernel(kernel)) == kernel
