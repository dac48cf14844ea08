"""The server as a deployment of Ray Serve, on a cluster of processes: a machine that dies, and one that comes."""

import json
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request

import pytest

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from aotc.serve.ray import actor_options, application  # noqa: E402
from aotc.serve.settings import Settings  # noqa: E402

PORT, RETRIES = 18_100, 60
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


def replicas():
    application = serve.status().applications["aotc"]
    return application.deployments["aotc"].replica_states.get("RUNNING", 0)


def test_a_machine_that_dies_under_load_loses_no_request(cluster, tiny_folder):
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
    end = time.monotonic() + 60
    while replicas() < 2 and time.monotonic() < end:
        time.sleep(0.5)
    assert replicas() == 2


def test_a_replica_with_a_gpu_asks_for_one(tiny_folder):
    assert actor_options(Settings(tiny_folder)) == {"num_cpus": 1, "num_gpus": 0}
    assert actor_options(Settings(tiny_folder, devices="cuda", threads=3)) == {"num_cpus": 3, "num_gpus": 1}
