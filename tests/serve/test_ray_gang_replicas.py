"""Sharded bundles on Ray Serve: each replica is a gang, on one host or on two; losses and scaling.

``make test-ray`` compiles the bundles: its environment has Ray, and no compiler. Nodes are processes of one machine.
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from support import tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.context import _get_global_client  # noqa: E402
from ray.util import placement_group_table  # noqa: E402

import aotc  # noqa: E402
from aotc.serve.ray import actor_options, application, applications, gpus_per_rank  # noqa: E402
from aotc.serve.settings import Settings  # noqa: E402
from aotc.vmfb.bundle import open_bundle, write_bundle  # noqa: E402

BUNDLES = Path(os.environ.get("AOTC_RAY_BUNDLES", ".venv-ray/bundles"))  # of serve.ray_bundles
LAYER, TEXT = (BUNDLES / f"{name}.vmfb" for name in ("layer2", "text"))  # each for 2 ranks
PORT, SECONDS = 18_101, 150
NAMES = ("params['w1']", "params['w2']", "x", "scale")


@pytest.fixture(scope="module", autouse=True)
def _bundles():
    if not LAYER.exists():
        pytest.skip(f"no bundles in {BUNDLES}")


@pytest.fixture(scope="module")
def cluster():
    """A head without cores, and two machines with two cores each."""
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", place)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [made.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=made.address)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
        yield made, nodes
        serve.shutdown()
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(place, ignore_errors=True)


def post(path, body):
    """Return status, headers and JSON of a response."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.headers, json.load(response)
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return error.code, error.headers, json.loads(text) if text.startswith("{") else text


def until(condition):
    """Wait until a condition holds; return its value."""
    end = time.monotonic() + SECONDS
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.25)
    return found


def arguments():
    random = np.random.default_rng(0)
    shapes = ((16, 32), (32, 16), (8, 16))
    return [*(random.standard_normal(shape, "f4") for shape in shapes), np.float32(0.25)]


def layer_request():
    rows = [(name, np.asarray(array)) for name, array in zip(NAMES, arguments(), strict=True)]
    about = {"datatype": "FP32"}
    return {"inputs": [{"name": n, "shape": [*a.shape], "data": a.ravel().tolist(), **about} for n, a in rows]}


def ask_layer():
    """Return True if the response is that of NumPy, and False if the server is not ready."""
    status, _, document = post("/v2/models/layer2/infer", layer_request())
    if status != 200:
        return False
    up, down, x, scale = arguments()
    h = np.maximum(x @ up, 0)
    y = h @ down * scale
    found = [np.reshape(row["data"], row["shape"]) for row in document["outputs"]]
    for array, expected in zip(found, ((y * y).sum(1), h.sum(0), 8, y), strict=True):
        np.testing.assert_allclose(array, expected, 1e-4, 1e-4)
    return True


def texts():
    """Return pairs of a prompt and the tokens that JAX generates."""
    return json.loads((BUNDLES / "tokens.json").read_text())


def ask_text(prompt, count):
    """Return status, headers and JSON of generated tokens."""
    return post("/v2/models/text/generate", {"tokens": prompt, "max_tokens": count})


def has_tokens():
    """Return True if all tokens are those of JAX, and False if the server is not ready."""
    for prompt, expected in texts():
        status, _, document = ask_text(prompt, len(expected))
        if status != 200:
            return False
        assert document["tokens"] == expected
    return True


def processes(text):
    """Return the processes whose command line has a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in place.read_text() and int(place.parent.name) != os.getpid():
                found.append(int(place.parent.name))
    return sorted(found)


def child_ranks():
    """Return the processes of ranks that are children of replicas."""
    return processes("from aotc.vmfb.gang.rank_process import serve")


def waits(process):
    """Return the number of waits of a process; a rank waits at least once per call."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])


def running_replicas():
    return serve.status().applications["aotc"].deployments["aotc"].replica_states.get("RUNNING", 0)


def replica_nodes():
    """Return the node of each replica."""
    deployments = _get_global_client().get_serve_details()["applications"]["aotc"]["deployments"]
    return [row["node_id"] for row in deployments["aotc"]["replicas"] if row["state"] == "RUNNING"]


def groups():
    return [row for row in placement_group_table().values() if row["state"] == "CREATED"]


def test_a_gang_in_one_replica_starts_again(cluster):
    serve.run(application(Settings(LAYER, ranks=2)), name="aotc", route_prefix="/")
    assert ask_layer()
    assert ray.available_resources().get("CPU") == 2  # of 4: a core for each rank
    assert not groups()
    ranks = child_ranks()
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    status, headers, document = post("/v2/models/layer2/infer", layer_request())
    assert status == 503, document
    assert int(headers["retry-after"]) >= 1
    assert "the ranks are started again" in document["error"]
    assert until(ask_layer)
    again = child_ranks()
    assert len(again) == 2
    assert not {*again} & {*ranks}


def test_gangs_start_and_stop_with_the_load(cluster):
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "metrics_interval_s": 0.5,
        "look_back_period_s": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 2,
    }  # fmt: skip
    serve.run(application(Settings(LAYER), autoscaling_config=scaling), name="aotc", route_prefix="/")
    assert until(ask_layer)
    ended, results = threading.Event(), []

    def load():
        while not ended.is_set():
            results.append(ask_layer())

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        assert until(lambda: running_replicas() == 2 and len(child_ranks()) == 4)
        assert len({*replica_nodes()}) == 2
        ranks = child_ranks()
        before = [waits(rank) for rank in ranks]
        assert until(lambda: all(waits(rank) > count + 20 for rank, count in zip(ranks, before, strict=True)))
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert results
    assert all(results)
    assert until(lambda: running_replicas() == 1 and len(child_ranks()) == 2)
    assert ask_layer()


def test_a_gang_of_two_hosts_starts_again_and_moves(cluster):
    """Kill a rank, then the machine of the replica; tokens are those of JAX after each."""
    made, nodes = cluster
    serve.delete("aotc")
    settings = Settings(TEXT, threads=2, weights=BUNDLES / "checkpoint.safetensors")
    options = {"health_check_period_s": 1, "health_check_timeout_s": 10, "graceful_shutdown_timeout_s": 1}
    serve.run(application(settings, hosts=2, **options), name="aotc", route_prefix="/")
    assert has_tokens()
    (group,) = groups()
    assert group["strategy"] == "PACK"
    assert {*group["bundles_to_node_id"].values()} == {node.node_id for node in nodes}
    ranks = processes("ray::RankActor")
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    status, headers, document = ask_text(*texts()[0][:1], 4)
    assert status == 503, document
    assert int(headers["retry-after"]) >= 1
    assert "started again" in document["error"]
    assert until(has_tokens)
    assert [row["placement_group_id"] for row in groups()] == [group["placement_group_id"]]
    spare = made.add_node(num_cpus=2)
    (place,) = replica_nodes()
    (lost,) = [node for node in nodes if node.node_id == place]
    made.remove_node(lost, allow_graceful=False)
    assert until(lambda: replica_nodes() not in ([], [place]))
    assert until(has_tokens)
    (group,) = groups()
    assert {*group["bundles_to_node_id"].values()} == {node.node_id for node in (*nodes, spare)} - {place}


def with_gpu_code(path, folder):
    """Write a bundle that claims to have code for GPUs too; return its path."""
    bundle = open_bundle(str(path), copy=True)
    manifest = copy.deepcopy(dict(bundle.manifest))
    names = [row["name"] for row in manifest.pop("segments")]
    manifest["variants"].append({**manifest["variants"][0], "target": "cuda:sm_90", "kind": "cuda"})
    segments = [(name, bytes(bundle.segment(number))) for number, name in enumerate(names)]
    (folder / path.name).write_bytes(write_bundle(None, manifest, segments))
    return folder / path.name


def test_replicas_request_the_cores_and_gpus_of_all_ranks(tmp_path):
    assert actor_options(Settings(LAYER, threads=3)) == {"num_cpus": 6, "num_gpus": 0}
    both = with_gpu_code(LAYER, tmp_path)
    assert gpus_per_rank(Settings(both)) == 1
    assert actor_options(Settings(both)) == {"num_cpus": 2, "num_gpus": 2}
    assert actor_options(Settings(tmp_path), gpus=0) == {"num_cpus": 2, "num_gpus": 0}
    one, two = (application(Settings(both, threads=2), hosts=n)._bound_deployment for n in (1, 2))
    assert one.ray_actor_options["num_gpus"] == 2
    assert two.ray_actor_options["num_cpus"] == two.ray_actor_options["num_gpus"] == 0
    config = two._replica_config
    assert config.placement_group_bundles == [{"CPU": 2, "GPU": 1}] * 2
    assert config.placement_group_strategy == "PACK"
    kinds = applications(Settings(both))
    assert {kind: one._bound_deployment.ray_actor_options["num_gpus"] for kind, one in kinds.items()} == {
        "cpu": 0, "cuda": 2,
    }  # fmt: skip


def test_wrong_values_are_refused_before_a_replica_starts(tmp_path):
    with pytest.raises(aotc.ArgumentValueError, match="2 ranks are not divided equally"):
        application(Settings(LAYER), hosts=3)
    with pytest.raises(aotc.BundleError, match=r"for 2 ranks .* there are 4"):
        application(Settings(LAYER, ranks=4), hosts=2)
    with pytest.raises(aotc.CallError, match="several hosts serve one sharded bundle"):
        application(Settings(BUNDLES), hosts=2)
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    with pytest.raises(aotc.BundleError, match="not sharded"):
        application(Settings(tmp_path / "tiny.vmfb"), hosts=2)
