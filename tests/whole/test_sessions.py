"""What later calls do without, and how many threads the modules of a process have together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

DIAMOND = Path(__file__).parents[1] / "support" / "programs" / "diamond.mlir"
THREADS = 3

CHILD = """
import json, os, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np, aotc
def tasks():
    return len(os.listdir("/proc/self/task"))
rng = np.random.default_rng(0)
before = tasks()  # those of NumPy's library among them
modules = [aotc.load(path) for path in sys.argv[1:] * 2]
def call(module):
    (name,) = module.functions
    arguments = module.functions[name].signature.arguments
    arrays = [rng.standard_normal(a["dims"]).astype(a["dtype"].replace("f", "float")) for a in arguments]
    return [module.invoke(name, *arrays)[0].sum().item() for _ in range(20)]
with ThreadPoolExecutor(len(modules)) as pool:
    sums = list(pool.map(call, modules))
end = time.monotonic() + 30
while tasks() - before > int(os.environ["AOTC_NUM_THREADS"]) - 1 and time.monotonic() < end:
    time.sleep(0.01)  # threads that were joined may still be on their way out
print(json.dumps({"more": tasks() - before, "sessions": len(modules)}))
"""


@pytest.fixture(scope="module")
def diamond():
    return aotc.compile(DIAMOND.read_text())


def test_later_calls_record_and_allocate_nothing(diamond):
    module = aotc.load(diamond, threads=2)
    (name,) = module.functions
    rng = np.random.default_rng(0)
    signature = module.functions[name].signature
    arrays = [rng.standard_normal(a["dims"]).astype("float32") for a in signature.arguments]
    module.invoke(name, *arrays)
    counts = [module.stats()[key] for key in ("recordings", "arena_allocations")]
    assert counts[0] == 1
    for _ in range(3):
        module.invoke(name, *arrays)
        module.submit(name, *arrays).result()
    assert counts == [module.stats()[key] for key in ("recordings", "arena_allocations")]


def test_each_tuple_of_sizes_is_recorded_once():
    import jax
    from jax import export

    (n,) = export.symbolic_shape("n")
    module = aotc.load(aotc.compile(lambda x: x + 1, jax.ShapeDtypeStruct((n,), "float32")))
    for size in (3, 4, 3, 4):
        module.invoke("main", np.ones(size, "float32"))
    assert module.stats()["recordings"] == 2


def test_modules_of_a_process_share_one_thread_pool(diamond, tmp_path):
    """Four modules of two bundles, called at the same time from four threads: the callers, and one pool beside them."""
    product = "func.func @main(%a: tensor<512x512xf32>) -> tensor<512x512xf32> { %0 = stablehlo.dot_general %a, %a, "
    product += "contracting_dims = [1] x [0] : (tensor<512x512xf32>, tensor<512x512xf32>) -> tensor<512x512xf32> "
    paths = [tmp_path / "a.vmfb", tmp_path / "b.vmfb"]
    paths[0].write_bytes(diamond)
    paths[1].write_bytes(aotc.compile(product + "return %0 : tensor<512x512xf32> }"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AOTC_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-c", CHILD, *map(str, paths)]
    found = json.loads(subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True).stdout)
    assert found["sessions"] == 4
    assert 1 <= found["more"] <= THREADS - 1
