"""The server on Ray Serve, on a cluster of processes: machines that die and come, replicas by load and by code."""

import contextlib
import json
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from support import tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.serve.context import _get_global_client  # noqa: E402

from aotc.serve.ray import actor_options, application, applications, kinds_of  # noqa: E402
from aotc.serve.settings import Settings  # noqa: E402
from aotc.vmfb.bundle import write_bundle  # noqa: E402
from aotc.vmfb.limits import EAGER_BYTES  # noqa: E402

PORT, RETRIES = 18_100, 60
PREFIXES = (("cpu", ""), ("cuda", "/gpu"))
ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]


@pytest.fixture(scope="module")
def cluster():
    """A head that computes nothing, and two machines with a core each."""
    place = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # names of sockets are short
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", place)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        nodes = [made.add_node(num_cpus=1) for _ in range(2)]
        ray.init(address=made.address)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": PORT})
        yield made, nodes
        serve.shutdown()
        ray.shutdown()
        made.shutdown()
    shutil.rmtree(place, ignore_errors=True)


def once(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data), timeout=20) as answer:
        return json.load(answer)


def ask(path, body=None):
    """Return (document, tries): what failed is asked again."""
    for tries in range(1, RETRIES + 1):
        try:
            return once(path, body), tries
        except (urllib.error.HTTPError, OSError):
            time.sleep(0.25)
    raise AssertionError(f"no answer to {path} after {RETRIES} tries")


def until(condition):
    """Wait for what a cluster needs time for."""
    end = time.monotonic() + 90
    while not condition() and time.monotonic() < end:
        time.sleep(0.25)
    return condition()


def replicas():
    application = serve.status().applications["aotc"]
    return application.deployments["aotc"].replica_states.get("RUNNING", 0)


def test_a_failed_machine_loses_no_request(cluster, tiny_folder):
    made, nodes = cluster
    settings = Settings(tiny_folder, threads=1)
    options = {"num_replicas": 2, "health_check_period_s": 1, "health_check_timeout_s": 5}
    serve.run(application(settings, **options), name="aotc", route_prefix="/")
    assert replicas() == 2
    assert once("/v2/models/tiny")["inputs"][0]["name"] == "x"
    answers, ended = [], threading.Event()

    def load():
        while not ended.is_set():
            document, tries = ask("/v2/models/tiny/infer", {"inputs": ROWS})
            answers.append((document["outputs"][0]["data"], tries))

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    before = len(answers)
    made.remove_node(nodes[0], allow_graceful=False)
    time.sleep(8)
    ended.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert before > 20
    assert len(answers) > before
    assert {tuple(data) for data, _ in answers} == {(2, 4, 6, 8)}
    made.add_node(num_cpus=1)
    assert until(lambda: replicas() == 2)


def test_replicas_scale_with_the_load(cluster, tmp_path):
    """By the options of Ray's autoscaling; a file is in the memory of all replicas once."""
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, "metrics_interval_s": 0.5,
        "look_back_period_s": 2, "upscale_delay_s": 0.5, "downscale_delay_s": 2,
    }  # fmt: skip
    manifest, segments = tiny.parts()
    large = [*segments, ("padding", bytes(2 * EAGER_BYTES))]  # smaller files are read, not mapped
    (tmp_path / "tiny.vmfb").write_bytes(write_bundle(None, manifest, large))
    settings = Settings(tmp_path, threads=1)
    serve.run(application(settings, autoscaling_config=scaling), name="aotc", route_prefix="/")
    assert replicas() == 1
    ended, lost = threading.Event(), []

    def load():
        while not ended.is_set():
            document, _ = ask("/v2/models/tiny/infer", {"inputs": ROWS})
            if document["outputs"][0]["data"] != [2, 4, 6, 8]:
                lost.append(document)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert until(lambda: replicas() == 2)
    assert until(lambda: len(mapping(tmp_path / "tiny.vmfb")) == 2)
    ended.set()
    for thread in threads:
        thread.join(60)
    assert not lost
    assert until(lambda: replicas() == 1)
    assert once("/v2/models/tiny")["name"] == "tiny"


def replica_rows():
    """Yield each replica, with the name of what it is of."""
    for served in _get_global_client().get_serve_details()["applications"].values():
        for name, deployment in served["deployments"].items():
            yield from ((name, replica) for replica in deployment["replicas"])


def mapping(path):
    """Processes that have a file mapped, not a copy of it."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path.resolve()) in maps.read_text():
                found.append(int(maps.parent.name))
    return found


def test_replicas_request_resources_by_target(cluster, tmp_path):
    """One on a machine with a GPU, which Ray is told that it has, and one on another; each says what it cannot load."""
    made, _ = cluster
    manifest, segments = tiny.parts()
    (tmp_path / "tiny.vmfb").write_bytes(write_bundle(None, manifest, segments))
    assert kinds_of(tmp_path) == {"cpu"}
    manifest["variants"].append({**manifest["variants"][0], "target": "cuda:sm_90", "kind": "cuda"})
    (tmp_path / "both.vmfb").write_bytes(write_bundle(None, manifest, segments))
    (tmp_path / "broken.vmfb").write_bytes(b"no bundle")
    assert kinds_of(tmp_path) == {"cpu", "cuda"}
    node = made.add_node(num_cpus=1, num_gpus=1)
    made_of = applications(Settings(tmp_path, threads=1), cpu={"num_replicas": 1})
    assert set(made_of) == {"cpu", "cuda"}
    serve.delete("aotc")
    for kind, one in made_of.items():
        serve.run(one, name=kind, route_prefix="/" if kind == "cpu" else "/gpu")
    states = {kind: {row["name"]: row for row in once(f"{path}/v2/repository/index", {})} for kind, path in PREFIXES}
    assert states["cpu"]["tiny"]["state"] == states["cpu"]["both"]["state"] == "READY"
    assert states["cuda"]["both"]["state"] == states["cuda"]["tiny"]["state"] == "UNAVAILABLE"
    assert states["cpu"]["broken"]["state"] == states["cuda"]["broken"]["state"] == "UNAVAILABLE"
    places = {name: row["node_id"] for name, row in replica_rows()}
    assert places["aotc-cuda"] == node.node_id != places["aotc-cpu"]
    assert ask("/v2/models/tiny/infer", {"inputs": ROWS})[0]["outputs"][0]["data"] == [2, 4, 6, 8]
    named = urllib.request.Request(f"http://127.0.0.1:{PORT}/v2/models/tiny", headers={"Host": "cluster.example"})
    with urllib.request.urlopen(named, timeout=20) as answer:
        assert json.load(answer)["name"] == "tiny"


def test_a_replica_of_a_gpu_bundle_requests_a_gpu(tiny_folder):
    assert actor_options(Settings(tiny_folder)) == {"num_cpus": 1, "num_gpus": 0}
    assert actor_options(Settings(tiny_folder, devices="cuda", threads=3)) == {"num_cpus": 3, "num_gpus": 1}
