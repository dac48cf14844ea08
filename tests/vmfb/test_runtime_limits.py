"""Both sides of the runtime's thresholds, where no other test crosses them."""

from types import SimpleNamespace

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.abi import DISPATCH, Command, Graph, constant_operand
from aotc.vmfb.bundle import open_bundle, segment_table_bytes, write_bundle
from aotc.vmfb.devices.cuda.launch import MAX_BLOCKS, MAX_THREADS
from aotc.vmfb.devices.cuda.loaded_kernels import check_kernels
from aotc.vmfb.devices.cuda.program import CudaProgram
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.limits import EAGER_BYTES, PLANS
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("more", [0, 1])
def test_segments_are_compared_with_their_digest_at_load(more):
    manifest, segments = tiny.parts(weights=bytes(EAGER_BYTES + more))
    data = bytearray(write_bundle(None, manifest, segments))
    table = open_bundle(data).manifest["segments"]
    (row,) = (row for row in table if row["size"] == EAGER_BYTES + more)
    data[len(data) - segment_table_bytes(table) + row["offset"]] ^= 1
    if more:
        open_bundle(data)
    else:
        with pytest.raises(BundleError, match="is damaged"):
            open_bundle(data)


def test_the_oldest_plan_goes_first():
    function = load(tiny.bundle(), threads=1)._functions["grow"]
    for n in range(4, 4 + PLANS):
        function.run([np.ones(n, np.float32)])
    assert len(function._plans) == PLANS
    function.run([np.ones(4 + PLANS, np.float32)])
    assert len(function._plans) == PLANS
    assert ((4,),) not in function._plans
    assert ((5,),) in function._plans


@pytest.mark.parametrize("threads", [MAX_THREADS, MAX_THREADS + 1])
def test_threads_of_a_block(threads):
    kernel = {"name": "k", "scratch": 0, "image": [0, 1], "inputs": 0, "symbol": "k", "threads": threads, "items": 1}
    variant = {"kernels": [kernel], "cubin": 0}
    if threads <= MAX_THREADS:
        check_kernels(SimpleNamespace(where="m"), variant)
    else:
        with pytest.raises(BundleError, match="incomplete"):
            check_kernels(SimpleNamespace(where="m"), variant)


@pytest.mark.parametrize("blocks", [MAX_BLOCKS, MAX_BLOCKS + 1])
def test_blocks_of_a_grid(blocks):
    launched = []
    executable = SimpleNamespace(
        gpu=SimpleNamespace(
            launch=lambda function, shape, table: launched.append((shape.blocks, shape.threads)), multiprocessors=4
        ),
        collectives={}, kernels=[{"name": "k", "items": 2, "threads": 32}],
        functions=[None],
        where="m",
    )
    nodes = [Graph([Command(DISPATCH, 0, constant_operand(2 * blocks), constant_operand(1), 0, (), [], [])], 0, True)]

    def run():
        CudaProgram(executable, [], nodes, [], None, record=False).run()

    if blocks <= MAX_BLOCKS:
        run()
        assert launched == [((MAX_BLOCKS, 1, 1), 32)]
    else:
        with pytest.raises(CallError, match="too large a grid"):
            run()
