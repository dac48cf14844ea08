"""What compiling a small model does without: JAX, Numba's front end, other processes."""

import json
import subprocess
import sys

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

TEXT = """func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {
  %y = stablehlo.subtract %x, %x : tensor<3xf32>
  return %y : tensor<3xf32>
}"""
SCRIPT = """
import json, sys
import aotc
from aotc.driver import bundle_cache
from aotc.kernels.jobs.pool import POOL
bundle_cache.read_cached_bundle = lambda key: None
data = aotc.compile(sys.stdin.read())
print(json.dumps([[m for m in ("jax", "aotc.kernels.numba_aot") if m in sys.modules], len(POOL._idle), len(data)]))
"""


def test_no_jax_no_front_end_and_no_process():
    """The executor is in the cache."""
    want = aotc.compile(TEXT)
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=TEXT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], 0, len(want)]
    np.testing.assert_array_equal(aotc.load(want).invoke("main", np.ones(3, np.float32))[0], np.zeros(3))
