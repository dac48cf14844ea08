"""Collectives between ranks, compared with StableHLO's specification in NumPy, and between transports."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import rank_cases
from support.rank_cases import Collective, run_threads

import aotc
from aotc.vmfb.dtypes import DTYPES
from aotc.vmfb.errors import CallError
from aotc.vmfb.ranks import collectives
from aotc.vmfb.ranks.threads import thread_links

pytestmark = pytest.mark.ir

SCRIPT = rank_cases.__file__


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def has_nan(array):
    return "float" in array.dtype.name or array.dtype.kind == "c"


def assert_same(found, wanted):
    assert found.dtype == wanted.dtype
    assert found.shape == wanted.shape
    if has_nan(found):  # which of two NaNs a sum returns is not specified
        at = np.isnan(found.astype(np.float32)) if found.dtype.kind != "c" else np.isnan(found)
        np.testing.assert_array_equal(at, np.isnan(wanted.astype(np.float32) if found.dtype.kind != "c" else wanted))
        found, wanted = (np.where(at, np.zeros((), found.dtype), x) for x in (found, wanted))
    if found.dtype.kind in "fV" or "float" in found.dtype.name:  # the order of two zeros is not specified
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_array_equal(bits(found), bits(wanted))


EIGHT = ("i1", "u4", "i32", "bf16", "f32", "c64")  # of one kind each; the ranks do not change what a dtype means


@pytest.mark.parametrize(("size", "dtype"), [*((4, dtype) for dtype in DTYPES), *((8, dtype) for dtype in EIGHT)])
def test_every_collective_of_a_dtype_is_as_the_specification_says(size, dtype):
    cases = [case for case in rank_cases.all_cases(size) if case[1] == dtype]
    assert len(cases) > 20
    results = run_threads(thread_links(size), lambda link: [rank_cases.run_one(link, case) for case in cases])
    for rank, found in enumerate(results):
        assert isinstance(found, list), found
        for case, result in zip(cases, found, strict=True):
            assert_same(result, rank_cases.expected(case, size, rank))


def limit_sizes(ranks):
    limit = collectives.GATHER_BYTES // (ranks - 1) // 4
    piece = collectives.PIECE_BYTES // 4
    return [0, 1, 2, ranks - 1, ranks + 1, limit - 1, limit, limit + 1, piece - 1, piece, piece + 1, 2 * piece + 3]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sizes_around_the_limits_of_an_all_reduce(ranks, monkeypatch):
    monkeypatch.setattr(collectives, "GATHER_BYTES", 64 << 10)
    monkeypatch.setattr(collectives, "PIECE_BYTES", 256 << 10)
    case = Collective("all_reduce", 3, reduction="add"), "f32"
    shapes = [(n,) for n in limit_sizes(ranks)]
    results = run_threads(thread_links(ranks), lambda link: [rank_cases.run_one(link, case, s) for s in shapes])
    for rank, found in enumerate(results):
        for shape, result in zip(shapes, found, strict=True):
            assert_same(result, rank_cases.expected(case, ranks, rank, shape))


def test_both_ways_of_an_all_reduce_have_the_same_bits(monkeypatch):
    """The sum has the order of the ranks in both, also of dtypes that are rounded once."""
    for dtype in ("bf16", "f32", "f8E4M3FN", "c64"):
        case = Collective("all_reduce", 5, groups=((2, 0, 1),), reduction="add"), dtype
        found = []
        for limit in (0, 1 << 30):
            monkeypatch.setattr(collectives, "GATHER_BYTES", limit)
            found.append(run_threads(thread_links(3), lambda link, case=case: rank_cases.run_one(link, case, (1001,))))
        first = bits(found[0][0])
        assert all((bits(result) == first).all() for results in found for result in results)


def test_bf16_is_summed_in_f32_and_rounded_once():
    """256 + 1 + 1 in bf16 is 256 if each sum is rounded, and 258 as XLA computes it."""
    import ml_dtypes

    def work(link):
        x = np.array([[256, 1, 1][link.rank]], ml_dtypes.bfloat16)
        result = np.zeros_like(x)
        collectives.run_collective(Collective("all_reduce", 0, reduction="add"), link, [x], [result])
        return float(result[0])

    assert run_threads(thread_links(3), work) == [258.0] * 3


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_extremes_propagate_nan_from_any_rank(reduction):
    for where in range(3):

        def work(link, where=where):
            x = np.array([np.nan if link.rank == where else link.rank, 1.0], np.float32)
            result = np.zeros_like(x)
            collectives.run_collective(Collective("all_reduce", 0, reduction=reduction), link, [x], [result])
            return result

        for result in run_threads(thread_links(3), work):
            assert np.isnan(result[0])
            assert result[1] == 1


def test_several_operands_are_reduced_each():
    def work(link):
        operands = [np.full(3, link.rank + k, np.int32) for k in (0, 10)]
        results = [np.zeros(3, np.int32) for _ in operands]
        collectives.run_collective(Collective("all_reduce", 0, reduction="add"), link, operands, results)
        return [r.tolist() for r in results]

    assert run_threads(thread_links(2), work) == [[[1] * 3, [21] * 3]] * 2


def test_a_rank_in_no_group_is_an_error():
    c = Collective("all_reduce", 4, ((0,),), reduction="add", place="model.py:3")
    x = np.ones(2, np.float32)
    with pytest.raises(CallError, match=r"rank 1 is in no group of all_reduce at model\.py:3, collective 4"):
        collectives.run_collective(c, thread_links(2)[1], [x], [x.copy()])


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def child_environment():
    root = Path(SCRIPT).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")])}


def thread_digests(size):
    cases = rank_cases.all_cases(size)
    return run_threads(thread_links(size), lambda link: rank_cases.digest(link, cases))


def test_tcp_has_the_same_bits_as_threads():
    address = f"127.0.0.1:{free_port()}"
    children = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), "4", address], stdout=subprocess.PIPE, text=True,
            env=child_environment(),
        )
        for rank in range(4)
    ]  # fmt: skip
    found = dict(json.loads(child.communicate(timeout=100)[0]) for child in children)
    assert [found[rank] for rank in range(4)] == thread_digests(4)


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="needs MPI: pip install mpich")
def test_mpi_has_the_same_bits_as_threads():
    done = subprocess.run(
        ["mpiexec", "-n", "4", sys.executable, SCRIPT], capture_output=True, text=True, timeout=200,
        env=child_environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {int(rank): text for rank, text in re.findall(r'\[(\d), "(\w+)"\]', done.stdout)}  # lines may be mixed
    assert [found[rank] for rank in range(4)] == thread_digests(4)


def test_more_ranks_than_one_process_can_run_are_refused():
    assert len(thread_links(256)) == 256
    with pytest.raises(aotc.ArgumentValueError, match="too many ranks for one process"):
        thread_links(257)
