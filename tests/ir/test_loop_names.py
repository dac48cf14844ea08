"""Names of loop variables are reserved: a model's dim of such a name is renamed before kernels are made."""

import pytest

from aotc.diagnostics import InternalError
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.tensor.substitute_dims import free_loop_names, is_loop_name
from aotc.ir.tensor.text import parse_module
from aotc.lowering.verify import verify_after_region

pytestmark = pytest.mark.ir
KERNEL = """def k(x: "f32[4]", /, o0: "f32[4]", *, grid: "1", flops: "0"):
    for {name} in range(0, 4):
        o0[{name}] = x[{name}]
"""


@pytest.mark.parametrize("name", ["t", "m", "l", "u", "kk", "i0", "c0_25", "b_i1", "t_q", "digit24"])
def test_a_loop_may_have_a_reserved_name(name):
    assert is_loop_name(name)
    verify_after_region(parse_kernel(KERNEL.format(name=name)))


@pytest.mark.parametrize("name", ["n", "batch", "d0", "d23", "arg1", "size_0_1"])
def test_verify_each_refuses_a_loop_that_is_named_like_a_dim(name):
    assert not is_loop_name(name)
    with pytest.raises(InternalError, match=f"a dim of a model may be named as the loop over {name}"):
        verify_after_region(parse_kernel(KERNEL.format(name=name)))


def test_dims_with_reserved_names_are_renamed():
    shape = "f32[m, n, m_dim]"
    text = f"func @main(%x: {shape}) -> ({shape}) {{\n  %0 = neg %x : {shape}\n  return %0\n}}\n"
    (function,) = free_loop_names(parse_module(text)).functions.values()
    assert [str(d) for d in function.body.params[0].type.shape] == ["m_dim_", "n", "m_dim"]
