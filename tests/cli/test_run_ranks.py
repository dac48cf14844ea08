"""``aotc run`` of a sharded bundle: a gang with --ranks, the ranks of a launcher, clear errors."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.rank_kills import free_port
from support.small_sharded import arguments, bundle, expected

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    bundle(2).save(folder / "model.vmfb")
    weights, x, _ = arguments()
    for name, array in {**weights, "x": x}.items():
        np.save(folder / f"{name}.npy", array)
    return folder / "model.vmfb"


@pytest.fixture(scope="module")
def words(model):
    """The command's words, with whole arrays."""
    folder = model.parent
    inputs = [f"--input=@{folder / name}.npy" for name in ("w1", "w2", "x")]
    return ["run", str(model), *inputs, "--input=0.25"]


def check_results(path):
    with np.load(path) as found:
        wanted = expected(*arguments())
        assert sorted(found) == sorted(
            ["result['norms'][0]", "result['norms'][1]", "result['rows'][0]", "result['y']"]
        )
        np.testing.assert_allclose(found["result['y']"], wanted["y"], 1e-5, 1e-5)
        np.testing.assert_allclose(found["result['norms'][1]"], wanted["norms"][1], 1e-5, 1e-5)


def start(words, **environ):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ}
    return subprocess.Popen(
        [sys.executable, "-m", "aotc", *words], env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_run_with_ranks_reads_and_writes_whole_arrays(command, words, tmp_path):
    code, said = command(*words, "--ranks=2", f"--output=@{tmp_path / 'y.npz'}", "--repeat=3")
    assert code == 0, said
    assert "3 calls, median" in said
    check_results(tmp_path / "y.npz")


def test_run_with_ranks_prints_whole_results(command, model):
    code, said = command("run", str(model), "--function=spin", "--input=8x4xf32=2", "--input=1", "--ranks=2")
    assert (code, said.strip()) == (0, "result[0]: 8x4xf32=" + "[1 1 1 1]" * 8)


def test_ranks_of_torchrun_take_their_shards_and_rank_0_writes(words, tmp_path):
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out = f"--output=@{tmp_path / 'y.npz'}"
    ranks = [start([*words, out, "--repeat=2"], RANK=str(rank), **places) for rank in range(2)]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "2 calls, median" in said[0][1]
    assert said[1] == ("", "")
    check_results(tmp_path / "y.npz")


def test_wrong_whole_shapes_are_an_error_on_each_rank(words):
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    wrong = [*words[:2], "--input=16x16xf32=1", *words[3:]]
    ranks = [start(wrong, RANK=str(rank), **places) for rank in range(2)]
    for rank in ranks:
        _, said = rank.communicate(timeout=100)
        assert rank.returncode == 1
        assert "params['w1'] is not the whole array" in said
        assert "expected: f32[16, 32]" in said


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 1, "for 2 ranks (model=2), and this is one process try: --ranks=2; torchrun"),
        (("--ranks=3",), 1, "for 2 ranks (model=2), and there are 3"),
        (("--ranks=0",), 2, "--ranks"),
        (("--ranks=2", "--nan-watch"), 2, "--nan-watch: it is for a bundle of one device"),
        (("--ranks=2", "--device=cpu"), 2, "--device: it is for a bundle of one device"),
        (("--ranks=2", "--input=3xf32"), 1, "params['w1']"),
    ],
)
def test_invalid_rank_options_are_named(command, model, options, code, message):
    found, said = command("run", str(model), "--zeros", "--function=main", *options)
    assert found == code, said
    assert message in " ".join(said.split())


def test_run_under_a_launcher_starts_no_gang(command, model, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, said = command("run", str(model), "--zeros", "--ranks=2")
    assert code == 2
    assert "a launcher has started this process as rank 1 of 2" in " ".join(said.split())


def test_a_bundle_of_one_device_refuses_ranks(command, tmp_path):
    import aotc

    path = tmp_path / "one.vmfb"
    aotc.compile(lambda x: x + 1, np.zeros(3, "f4")).save(path)
    code, said = command("run", str(path), "--zeros", "--ranks=2")
    assert code == 1
    assert "is not sharded: it has no ranks" in said
    assert "leave out --ranks" in said


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
def test_ctrl_c_ends_the_command_and_its_ranks(model):
    process = start(
        ["run", str(model), "--function=spin", "--input=8x4xf32=2", "--input=1000000000", "--ranks=2"]
    )
    try:
        time.sleep(4)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 130
        assert said == "interrupted\n"
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        process.kill()
