"""Functions for rare arguments: loops that call them are vectorised, and every lane gets its own result."""

import re

import numpy as np
import pytest

pytest.importorskip("numba")

from support.scalar_kernels import one_kernel, run

from aotc.ir.opset.elementwise import SCALARS, apply_scalar_op
from aotc.kernels.cpu.compile import optimized_kernel_module
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu

INF = np.inf
# op, dtype, what the loop calls, usual operands, rare ones
CALLS = [
    ("sin", "f64", "sine_of_large", (1.25, 0.0), (1e300, 0.0)),
    ("cos", "f32", "sine_of_large", (1.25, 0.0), (1e30, 0.0)),
    ("rem", "f64", "remainder", (7.5, 2.0), (1e100, 3.0)),
    ("pow", "f64", "power", (1.5, 2.5), (5e-324, 0.5)),
    ("lgamma", "f32", "log_gamma_of_negative", (-2.5, 0.0), (-2.4570248, 0.0)),
    ("lgamma", "f64", "log_gamma_of_negative", (3.5, 0.0), (-2.5, 0.0)),
    ("div", "c64", "quotient_of_narrow", (1 + 2j, 3 - 1j), (1 + 2j, complex(INF, 1))),
    ("div", "c128", "quotient", (1 + 2j, 3 - 1j), (1e300 + 1e300j, 1e300 + 2e300j)),
    ("sqrt", "c64", "root_of_narrow", (3 + 4j, 0), (complex(-INF, np.nan), 0)),
    ("sqrt", "c128", "root", (3 + 4j, 0), (1e300 + 1e300j, 0)),
]
IDS = [f"{name}-{dtype}" for name, dtype, *_ in CALLS]


def kernel(name, dtype, length):
    return one_kernel(f"{name}_{dtype}", dtype, [(SCALARS[name], dtype)], length)


@pytest.mark.parametrize(("name", "dtype", "rare", "usual", "unusual"), CALLS, ids=IDS)
def test_a_loop_is_vectorised(name, dtype, rare, usual, unusual):
    text = str(optimized_kernel_module(kernel(name, dtype, 4096), TARGETS["cpu:x86-64-v3"]))
    assert re.search(rf"call .*@aotc\.{rare}\.v[48]\(", text)
    assert "@aotc.rarely" not in text


@pytest.mark.parametrize(("name", "dtype", "rare", "usual", "unusual"), CALLS, ids=IDS)
def test_every_lane_gets_its_own_result(name, dtype, rare, usual, unusual):
    length, kind = 41, to_numpy(dtype)
    program = kernel(name, dtype, length * length)
    seldom = np.eye(length, dtype=bool).reshape(-1)  # at every place of a vector, and once each 42
    operands = [np.where(seldom, np.array(r, kind), np.array(u, kind)) for u, r in zip(usual, unusual)]
    out = np.zeros(length * length, kind)
    run(program, [*operands, out], length * length)
    with np.errstate(all="ignore"):
        want = apply_scalar_op(SCALARS[name], operands[: SCALARS[name].arity], dtype)
    tolerance = 1e-6 if dtype in ("f32", "c64") else 1e-14
    np.testing.assert_allclose(out, want, rtol=tolerance)
