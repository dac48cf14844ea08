"""Ranks of a sharded model as actors of Ray: placed together, right, and started again after a loss.

``make test-ray`` compiles the bundles: its environment has Ray, and no compiler.
"""

import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

import aotc  # noqa: E402
from aotc.serve import ray_gang  # noqa: E402
from aotc.serve.ray_gang import RayGang  # noqa: E402

BUNDLES = Path(os.environ.get("AOTC_RAY_BUNDLES", ".venv-ray/bundles"))  # of serve.ray_bundles
BUNDLE = BUNDLES / "layer4.vmfb"  # mesh: data=2 x model=2


@pytest.fixture(scope="module")
def cluster():
    """A head without cores, and two machines with two cores each."""
    if not BUNDLE.exists():
        pytest.skip(f"no bundle {BUNDLE}")
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", place)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=2)
        ray.init(address=made.address)
        yield made
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(place, ignore_errors=True)


def arguments():
    """Return the arguments of ``main``: two matrices, rows, and a factor."""
    random = np.random.default_rng(0)
    shapes = ((16, 32), (32, 16), (8, 16))
    return [*(random.standard_normal(shape, "f4") for shape in shapes), np.float32(0.25)]


def check(found):
    up, down, x, scale = arguments()
    h = np.maximum(x @ up, 0)
    y = h @ down * scale
    norms, columns, rows, result = found
    assert rows == 8
    for array, expected in ((norms, (y * y).sum(1)), (columns, h.sum(0)), (result, y)):
        np.testing.assert_allclose(array, expected, 1e-4, 1e-4)


def test_ranks_of_two_hosts_are_packed_and_restart(cluster):
    with RayGang(BUNDLE, hosts=2, timeout=120) as gang:
        assert gang.strategy == "PACK"
        check(gang.invoke("main", *arguments()))
        (row,) = [row for row in placement_group_table().values() if row["state"] == "CREATED"]
        assert row["strategy"] == "PACK"
        assert len(set(row["bundles_to_node_id"].values())) == 2
        os.kill(gang.processes[2], signal.SIGKILL)
        with pytest.raises(aotc.RankLost, match="rank 2") as caught:
            gang.invoke("main", *arguments())
        assert caught.value.rank == 2
        check(gang.invoke("main", *arguments()))
        assert gang.starts == 2


def test_functions_take_pytrees_and_wrong_arguments_end_no_rank(cluster, monkeypatch):
    up, down, x, scale = arguments()
    with RayGang(BUNDLE, hosts=2, timeout=120) as gang:
        found = gang({"w1": up, "w2": down}, x, scale)
        check([*found["norms"], *found["rows"], found["y"]])
        with pytest.raises(aotc.ArgumentValueError, match="one rank's part"):
            gang.main({"w1": up[:, :16], "w2": down}, x, scale)
        with pytest.raises(aotc.CallError, match="no function 'other'"):
            gang.invoke("other")
        with pytest.raises(aotc.CallError, match="wrong number of arguments"):
            gang.invoke("spin", np.zeros((8, 4), "f4"))
        assert not gang.has_ended
        monkeypatch.setattr(ray_gang, "_MESSAGE_BYTES", 0)  # all parts through Ray's object store
        check(gang.invoke("main", *arguments()))
        assert gang.starts == 1
    with pytest.raises(aotc.CallError, match="it was closed"):
        gang.invoke("main", *arguments())


def test_a_state_stays_on_the_ranks_until_one_is_lost(cluster):
    prompt, expected = json.loads((BUNDLES / "tokens.json").read_text())[0]
    with RayGang(BUNDLES / "text.vmfb", hosts=2, weights=BUNDLES / "checkpoint.safetensors", timeout=120) as gang:
        state = gang.new_state()
        found = [int(gang.step("prefill", np.array([prompt], np.int32), state).argmax())]
        while len(found) < len(expected):
            found.append(int(gang.step("decode", np.array([found[-1:]], np.int32), state).argmax()))
        assert found == expected
        os.kill(gang.processes[0], signal.SIGKILL)
        with pytest.raises(aotc.RankLost):
            gang.step("decode", np.array([[1]], np.int32), state)
        with pytest.raises(aotc.CallError, match="the state is lost"):
            gang.step("decode", np.array([[1]], np.int32), state)
        assert int(gang.step("prefill", np.array([prompt], np.int32), gang.new_state()).argmax()) == expected[0]
        assert gang.starts == 2


def test_a_gang_without_restart_ends_with_its_first_loss(cluster):
    gang = RayGang(BUNDLE, hosts=2, timeout=120, restart=False)
    os.kill(gang.processes[1], signal.SIGKILL)
    with pytest.raises(aotc.RankLost):
        gang.invoke("main", *arguments())
    assert gang.has_ended
    with pytest.raises(aotc.CallError, match="the gang has ended"):
        gang.invoke("main", *arguments())
    gang.close()


def test_one_host_without_enough_cpus_is_an_error(cluster):
    with pytest.raises(aotc.CallError, match="no room for 4 ranks"):
        RayGang(BUNDLE, hosts=1, timeout=3)


def test_ranks_of_one_host_are_placed_together(cluster):
    node = cluster.add_node(num_cpus=4)
    with RayGang(BUNDLE, timeout=120) as gang:
        check(gang.invoke("main", *arguments()))
        (row,) = [row for row in placement_group_table().values() if row["state"] == "CREATED"]
        assert row["strategy"] == "STRICT_PACK"
        assert set(row["bundles_to_node_id"].values()) == {node.node_id}


def test_ranks_not_divisible_by_hosts_are_refused(cluster):
    with pytest.raises(aotc.ArgumentValueError, match="4 ranks are not divided equally"):
        RayGang(BUNDLE, hosts=3)
