"""A folder of bundles: versions, what is replaced while it is asked, what cannot be loaded, links that lead out."""

import os
import threading
import time

import numpy as np
import pytest
from support import tiny
from support.served import running, until

from aotc.serve import model as loading
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.ir

ROW = {"name": "x", "shape": [4], "datatype": "FP32", "data": [1, 1, 1, 1]}
GROW = "/v2/models/{}.grow/infer"


def scaled(weight):
    """The tiny bundle, whose ``grow`` multiplies by twice this."""
    data = tiny.constants()
    data[:4] = np.frombuffer(np.float32(weight).tobytes(), np.uint8)
    return write_bundle(None, *tiny.parts(data.tobytes()))


def put(path, data):
    """Write a file under another name, and rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = path.parent / f".{path.name}-{threading.get_ident()}"
    other.write_bytes(data)
    os.replace(other, path)


def value(server, name, version=""):
    path = GROW.format(name) if not version else f"/v2/models/{name}.grow/versions/{version}/infer"
    status, document = server.json(path, {"inputs": [ROW]})
    return document["outputs"][0]["data"][0] if status == 200 else status


def states(server):
    rows = server.json("/v2/repository/index", {})[1]
    return {(row["name"], row.get("version", "")): (row["state"], row["reason"]) for row in rows}


def test_versions_are_loaded_and_unloaded_with_their_files(tmp_path):
    put(tmp_path / "one.vmfb", scaled(1))
    put(tmp_path / "many" / "2" / "model.vmfb", scaled(2))
    put(tmp_path / "many" / "10" / "model.vmfb", scaled(10))
    put(tmp_path / "many" / "x" / "model.vmfb", scaled(3))
    put(tmp_path / ".hidden.vmfb", scaled(3))
    with running(tmp_path, poll=0.02) as server:
        assert set(server.engine.repository.models) == {"one", "many"}
        assert [value(server, "one"), value(server, "many"), value(server, "many", "2")] == [2, 20, 4]
        assert server.json("/v2/models/many")[1]["versions"] == ["2", "10"]
        put(tmp_path / "many" / "11" / "model.vmfb", scaled(11))
        assert until(lambda: value(server, "many") == 22)
        os.unlink(tmp_path / "many" / "11" / "model.vmfb")
        assert until(lambda: value(server, "many") == 20)
        os.unlink(tmp_path / "one.vmfb")
        assert until(lambda: value(server, "one") == 404)


def test_unloadable_files_change_only_the_reported_state(tmp_path):
    put(tmp_path / "good.vmfb", scaled(1))
    put(tmp_path / "bad.vmfb", b"no bundle")
    with running(tmp_path, poll=0.02) as server:
        assert value(server, "good") == 2
        assert value(server, "bad") == 404
        assert states(server)["bad", "1"][0] == "UNAVAILABLE"
        put(tmp_path / "good.vmfb", scaled(3)[:2000])
        assert until(lambda: "cannot be loaded" in states(server)["good", "1"][1])
        assert value(server, "good") == 2
        put(tmp_path / "good.vmfb", scaled(3))
        put(tmp_path / "bad.vmfb", scaled(4))
        assert until(lambda: value(server, "good") == 6)
        assert until(lambda: value(server, "bad") == 8)
        assert all(state == ("READY", "") for state in states(server).values())


def test_a_link_out_of_the_folder_is_refused(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    put(outside / "secret.vmfb", scaled(1))
    put(outside / "3" / "model.vmfb", scaled(1))
    put(folder / "real.vmfb", scaled(2))
    (folder / "secret.vmfb").symlink_to(outside / "secret.vmfb")
    (folder / "many").symlink_to(outside)
    (folder / "alias.vmfb").symlink_to("real.vmfb")
    with running(folder, model_control=True) as server:
        assert set(server.engine.repository.models) == {"real", "alias"}
        assert value(server, "alias") == 4
        assert "leads out" in states(server)["secret", "1"][1]
        status, document = server.json("/v2/repository/models/secret/load", {})
        assert (status, "leads out" in document["error"]) == (400, True)
        for name in ("..", "..%2Foutside%2Fsecret", "%2Fetc%2Fpasswd", "a%00b", "-x"):
            assert server.json(f"/v2/repository/models/{name}/load", {})[0] in (400, 404)


def link_to(outside, path):
    """Put a link to another place where something is."""
    path.with_suffix(".link").symlink_to(outside)
    if path.is_dir():
        path.rename(path.with_suffix(".old"))
    os.replace(path.with_suffix(".link"), path)


def test_a_link_created_before_opening_is_refused(tmp_path, monkeypatch):
    """The folder was looked at, and then somebody was quicker than the loader."""
    outside, folder = tmp_path / "outside.vmfb", tmp_path / "folder"
    put(outside, scaled(1))
    put(folder / "m.vmfb", scaled(2))
    real, opened = loading.open_bundle, []

    def late(path, copy):
        if not opened:
            link_to(outside, folder / "m.vmfb")
        opened.append(path)
        return real(path, copy)

    monkeypatch.setattr(loading, "open_bundle", late)
    with running(folder, poll=0.0) as server:
        assert len(opened) == 1
        state, reason = states(server)["m", "1"]
        assert state == "UNAVAILABLE"
        assert "replaced while it was opened" in reason


def test_a_link_created_during_the_scan_is_refused(tmp_path, monkeypatch):
    """Its path was resolved, and then a folder of it became a link."""
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    put(outside / "model.vmfb", scaled(1))
    put(folder / "m" / "3" / "model.vmfb", scaled(2))
    real = os.path.realpath

    def late(path, **more):
        found = real(path, **more)
        if str(path).endswith("model.vmfb") and not (folder / "m" / "3").is_symlink():
            link_to(outside, folder / "m" / "3")
        return found

    monkeypatch.setattr(os.path, "realpath", late)
    with running(folder, poll=0.0) as server:
        assert not server.engine.repository.models
        assert states(server)["m", ""][0] == "UNAVAILABLE"


def test_clients_load_and_unload_models_with_model_control(tmp_path):
    put(tmp_path / "a.vmfb", scaled(1))
    with running(tmp_path, model_control=True, poll=0.02) as server:
        assert server.json("/v2")[1]["extensions"][-1] == "model_repository"
        assert server.json("/v2/repository/models/a/unload", {}) == (200, {})
        assert value(server, "a") == 404
        assert states(server) == {("a", ""): ("UNAVAILABLE", "unloaded")}
        time.sleep(0.1)  # looks at the folder do not load it again
        assert value(server, "a") == 404
        assert server.json("/v2/repository/models/a/load", {}) == (200, {})
        assert value(server, "a") == 2
        put(tmp_path / "b.vmfb", scaled(2))
        assert server.json("/v2/repository/models/b/load", {}) == (200, {})
        assert value(server, "b") == 4
        assert server.json("/v2/repository/models/c/load", {})[0] == 404
        assert server.json("/v2/repository/models/c/unload", {})[0] == 404
        put(tmp_path / "c.vmfb", b"")
        assert server.json("/v2/repository/models/c/load", {})[0] == 400


def test_no_request_is_lost_while_a_bundle_is_replaced(tmp_path):
    """Each answer is of one of the two bundles; the benchmark does a thousand."""
    both = [scaled(1), scaled(2)]
    put(tmp_path / "a.vmfb", both[0])
    values, ended = [], threading.Event()
    with running(tmp_path, poll=0.001) as server:

        def ask():
            while not ended.is_set():
                values.append(value(server, "a"))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for n in range(30):
            put(tmp_path / "a.vmfb", both[n % 2])
            time.sleep(0.01)
        ended.set()
        for thread in threads:
            thread.join()
        text = server.ask("/metrics")[2].decode()
    assert set(values) == {2, 4}
    loads = float(text.partition('aotc_loads_total{model="a"} ')[2].partition("\n")[0])
    assert loads >= 5


def test_a_single_bundle_is_replaced_and_survives_deletion(tmp_path):
    path = tmp_path / "one.vmfb"
    put(path, scaled(1))
    with running(path, poll=0.02) as server:
        put(path, scaled(2))
        assert until(lambda: value(server, "one") == 4)
        os.unlink(path)
        time.sleep(0.1)
        assert value(server, "one") == 4


@pytest.mark.parametrize("data", [b"", b"no bundle", tiny.bundle()[:3000] if tiny.shutil.which("cc") else b"x"])
def test_an_unreadable_single_bundle_is_an_error_at_start(tmp_path, data):
    (tmp_path / "bad.vmfb").write_bytes(data)
    with pytest.raises(CallError, match=r"bad\.vmfb"), running(tmp_path / "bad.vmfb"):
        pass


def test_an_empty_folder_is_not_ready(tmp_path):
    with running(tmp_path, poll=0.02) as server:
        assert server.json("/v2/health/ready")[0] == 503
        assert server.json("/v2/health/live")[0] == 200
        put(tmp_path / "a.vmfb", scaled(1))
        assert until(lambda: server.json("/v2/health/ready")[0] == 200)
