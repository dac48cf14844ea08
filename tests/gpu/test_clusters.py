"""Products whose blocks share an operand's tiles by clusters: what each copies, who waits for whom, how they launch."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.products import product_text, simulate
from gpu.test_simulated_gemm import FORMS, NT, SUMS, operands, wanted

from aotc.ir.loop_parser import parse_kernel
from aotc.kernels.cuda import block, hopper
from aotc.kernels.cuda.templates import gemm_wgmma
from aotc.kernels.cuda.templates.product_launch import launch_entry, tiles_of
from aotc.vmfb.devices.launch import launch_of
from aotc.vmfb.safety.interface import evaluate

pytestmark = pytest.mark.cudasim


def entry_of(tiling, sizes, kind="bf16", **orders):
    kernel = parse_kernel(product_text(tiling, kind, "f32", sizes, **orders))
    return {"name": "gemm", "threads": tiles_of(kernel).threads, "launch": launch_entry(kernel)}


def copied(tiling, monkeypatch, sizes=(128, 128, 128)):
    """Return how many bytes the blocks read of A and of B, and the result."""
    text, read = product_text(tiling, "bf16", "f32", sizes, **NT), {}
    part = block.Array.part

    def counted(self, *place):
        found = part(self, *place)
        owner = self.elements.__array_interface__["data"][0]
        read[owner] = read.get(owner, 0) + found.nbytes
        return found

    monkeypatch.setattr(block.Array, "part", counted)
    _, arrays = operands(text)
    simulate(text, arrays)
    np.testing.assert_array_equal(arrays[-1], wanted(arrays, NT))
    return [read[x.__array_interface__["data"][0]] for x in arrays[:2]]


def test_what_blocks_share_is_read_once(monkeypatch):
    """Four tiles of 64 x 64: each reads its rows of A and columns of B; those below each other the same."""
    each = 64 * 128 * 2
    assert copied("wgmma(64, 64, 2)", monkeypatch) == [4 * each, 4 * each]
    assert copied("wgmma(64, 64, 2, cluster=2)", monkeypatch) == [4 * each, 2 * each]
    assert copied("wgmma_turned(64, 64, 2, cluster=2)", monkeypatch) == [2 * each, 4 * each]


@pytest.mark.parametrize("cluster", [1, 2, 4])
@pytest.mark.parametrize("rows", [64, 128, 192, 320])
def test_tiles_beyond_the_last_fill_a_cluster(rows, cluster):
    entry = entry_of(f"wgmma(64, 64, 2, cluster={cluster})".replace(", cluster=1", ""), (rows, 192, 64), **NT)
    assert entry["launch"]["cluster"] == [cluster, 1, 1]
    blocks = evaluate(entry["launch"]["blocks"][0], ())
    assert blocks == 3 * -(-rows // 64 // cluster) * cluster


def test_columns_fill_the_cluster_of_a_product_that_is_turned():
    assert entry_of("wgmma_turned(64, 64, 2, cluster=2)", (64, 192, 64), **NT)["launch"]["blocks"][0] == 4


def test_blocks_that_stay_are_whole_clusters():
    entry = entry_of("wgmma(128, 256, 4, cluster=2)", (4096, 4096, 64), **NT)
    assert [launch_of("m", entry, (), 1, count).blocks[0] for count in (132, 131, 1)] == [132, 130, 2]
    assert launch_of("m", entry, (), 1, 132).cluster == (2, 1, 1)


def test_an_operand_by_rows_is_shared_by_whole_boxes():
    assert entry_of("wgmma(64, 128, 2, cluster=2)", (64, 128, 64))["launch"]["maps"][1]["box"] == [64, 64]
    assert entry_of("wgmma(64, 64, 2, cluster=2)", (64, 128, 64), **NT)["launch"]["maps"][1]["box"] == [64, 32]
    with pytest.raises(ValueError, match="no whole boxes"):
        entry_of("wgmma(64, 64, 2, cluster=2)", (64, 128, 64))


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("cluster")])
def test_no_block_overwrites_what_another_reads(monkeypatch, name, slow):
    """What is copied lies there a while after its place is overwritten; one block is behind the other."""
    land, arrive = hopper._land, gemm_wgmma.barrier_arrive_at

    def begin(part, to, barrier, owner):
        rows, bytes_ = np.indices((len(part), part.shape[1] * part.itemsize))
        owner.memory[to + hopper.swizzled(rows, bytes_)] = 0xFF
        threading.Timer(0.001, land, (part, to, barrier, owner)).start()

    def arrive_late(barrier):
        time.sleep(0.003 if block.here().block.rank == slow else 0)
        arrive(barrier)

    monkeypatch.setattr(hopper, "_land", begin)
    monkeypatch.setattr(gemm_wgmma, "barrier_arrive_at", arrive_late)
    tiling, kind, orders = FORMS[name]
    text = product_text(tiling, kind, SUMS.get(kind, "f32"), (144, 80, 272), **orders)
    _, arrays = operands(text)
    simulate(text, arrays)
    np.testing.assert_array_equal(arrays[-1], wanted(arrays, orders))


def test_a_stage_that_is_given_back_is_told_to_both_blocks(monkeypatch):
    """Both write to it: each of two warpgroups tells each block, of every stage of 4 turns of the tile."""
    told, arrive = Counter(), gemm_wgmma.barrier_arrive_at

    def noted(barrier):
        told[block.here().block.rank, barrier >> 24] += 1
        arrive(barrier)

    monkeypatch.setattr(gemm_wgmma, "barrier_arrive_at", noted)
    text = product_text("wgmma(128, 64, 2, cluster=2)", "bf16", "f32", (256, 64, 256), **NT)
    simulate(text, operands(text)[1])
    assert told == {(giver, owner): 2 * 4 for giver in range(2) for owner in range(2)}
