"""A loaded bundle on the executor that ships: the tiny programs, several threads, several callers, forks."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import tiny

pytest.importorskip("numba")

from aotc.kernels.cpu.build import build_executor
from aotc.options import Options
from aotc.targets import host_target
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.module import load

pytestmark = pytest.mark.cpu

X = np.arange(4, dtype=np.float32)
Y = np.full(4, 10, np.float32)


@pytest.fixture(scope="module")
def bundle():
    manifest, segments = tiny.parts()
    segments[0] = ("executor", build_executor(host_target(), Options()))
    return write_bundle(None, manifest, segments)


@pytest.fixture(scope="module", params=[1, 2, 5])
def module(request, bundle):
    return load(bundle, threads=request.param)


def check_all(module, n=100_000):
    """Run every function of the tiny bundle once."""
    wide = np.arange(n, dtype=np.float32)
    assert module.invoke("main", X, Y)[0].tolist() == [10, 11, 12, 13]
    np.testing.assert_array_equal(module.invoke("grow", wide)[0], 6 * wide)
    assert module.invoke("count", 17)[0] == 17
    np.testing.assert_array_equal(module.invoke("upto", n)[0], wide)
    assert module.invoke("update", X, Y)[0].tolist() == [10, 11, 12, 13]
    assert module.invoke("pick", 0, X, Y)[0].tolist() == X.tolist()
    assert module.invoke("pick", 7, X, Y)[0].tolist() == Y.tolist()


def test_every_function(module):
    check_all(module)


def test_many_callers(module):
    failures = []

    def call(size):
        try:
            for _ in range(5):
                check_all(module, size)
        except BaseException as error:
            failures.append(error)

    callers = [threading.Thread(target=call, args=(1000 * i + 4,)) for i in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


FORK = """
import os, sys
import aotc, numpy as np
module = aotc.load(sys.argv[1], threads=3)
x = np.arange(100_000, dtype=np.float32)
compute = lambda: np.array_equal(module.invoke("grow", x)[0], 6 * x)
assert compute()
child = os.fork()
good = compute()
if not child:
    os._exit(not good)
assert good and os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_computes(bundle, tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(bundle)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", FORK, str(path)], check=True, env=environment, timeout=60)


def test_two_bundles_share_one_executor(bundle):
    first, second = load(bundle, threads=2), load(tiny.bundle(), threads=2)
    check_all(first)
    check_all(second)


def test_stats(module):
    check_all(module)
    stats = module.stats()
    assert stats["target"] == "cpu:any"
    assert stats["kernels"] == 4
    assert stats["constants_bytes"] == 128
    assert stats["threads"] in (1, 2, 5)
