"""The end of a gang: ranks that die, a caller that dies, interrupts, forks, errors in ranks."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from support.small_sharded import arguments, assert_close, bundle, expected

import aotc
from aotc.vmfb.errors import BundleError, CallError, RankLost
from aotc.vmfb.gang.rank_processes import cause
from aotc.vmfb.ranks.threads import thread_links

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")]

X = np.ones((8, 4), "f4")
LONG = 1_000_000_000


def is_running(process):
    try:
        with open(f"/proc/{process}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(processes, seconds=5.0):
    end = time.monotonic() + seconds
    while any(map(is_running, processes)):
        assert time.monotonic() < end, "a rank is still running"
        time.sleep(0.01)


def after(seconds, action, *args):
    timer = threading.Timer(seconds, action, args)
    timer.start()
    return timer


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_and_the_others_end(victim):
    with aotc.gang(bundle(2)) as module:
        killed = []

        def kill():
            os.kill(module.processes[victim], signal.SIGKILL)
            killed.append(time.monotonic())

        after(0.5, kill)
        with pytest.raises(aotc.RankLost) as caught:
            module.spin(X, LONG)
        assert time.monotonic() - killed[0] < 3  # below 1 s where the machine is not loaded
        assert caught.value.rank == victim
        text = str(caught.value)
        assert f"rank {victim} (" in text
        assert f"process {module.processes[victim]}) was killed by SIGKILL during a call of spin" in text
        assert not any(map(is_running, module.processes))
        with pytest.raises(CallError, match=f"the gang has ended: its ranks were ended by RankLost: rank {victim}"):
            module(*arguments())


def test_a_rank_killed_between_calls_is_named_by_the_next():
    with aotc.gang(bundle(2)) as module:
        assert_close(module(*arguments()), expected(*arguments()))
        os.kill(module.processes[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 1 .* was killed by SIGKILL"):
            module(*arguments())
        wait_until_ended(module.processes)


def test_leaving_the_block_ends_the_ranks():
    with aotc.gang(bundle(2)) as module:
        assert all(map(is_running, module.processes))
    assert not any(map(is_running, module.processes))
    module.close()
    with pytest.raises(CallError, match="the gang has ended: it was closed"):
        module(*arguments())


def test_a_gang_that_nobody_has_any_more_ends():
    module = aotc.gang(bundle(2))
    processes = module.processes
    del module
    wait_until_ended(processes)


def test_closing_ends_a_call_of_another_thread():
    module = aotc.gang(bundle(2))
    after(0.5, module.close)
    with pytest.raises(CallError, match="the gang has ended: it was closed"):
        module.spin(X, LONG)
    wait_until_ended(module.processes)


SCRIPT = """
import sys, os, numpy as np, aotc
with aotc.gang(sys.argv[1]) as module:
    print(*module.processes, flush=True)
    if sys.argv[2] == "call":
        module.spin(np.ones((8, 4), "f4"), 1_000_000_000)
    if sys.argv[2] == "idle":
        sys.stdin.read()
    if sys.argv[2] == "fork":
        child = os.fork()
        if not child:
            try:
                module.spin(np.ones((8, 4), "f4"), 1)
            except aotc.CallError as error:
                print(str(error).splitlines()[0], flush=True)
            module.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(module.spin(np.ones((8, 4), "f4"), 1)[0, 0], flush=True)
print("end", flush=True)
"""


def start(tmp_path, what):
    path = tmp_path / "model.vmfb"
    bundle(2).save(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(path), what], env=environment, text=True, start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return process, [int(word) for word in process.stdout.readline().split()]


@pytest.mark.parametrize("what", ["call", "idle"])
def test_ranks_end_when_their_caller_is_killed(tmp_path, what):
    process, ranks = start(tmp_path, what)
    assert len(ranks) == 2
    time.sleep(0.3)
    process.kill()
    process.communicate()
    wait_until_ended(ranks)


def test_ctrl_c_of_a_terminal_ends_all_with_one_traceback(tmp_path):
    process, ranks = start(tmp_path, "call")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert said.count("Traceback") == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")
    wait_until_ended(ranks)


def test_a_forked_child_is_refused_and_ends_nothing(tmp_path):
    process, ranks = start(tmp_path, "fork")
    said, errors = process.communicate(timeout=60)
    assert said.splitlines()[0].startswith(f"the gang belongs to process {process.pid}"), errors
    assert said.splitlines()[1:] == ["0.5", "end"], errors
    wait_until_ended(ranks)


def test_an_error_of_all_ranks_at_the_start_reaches_the_caller_once(tmp_path, capfd):
    (tmp_path / "weights.safetensors").write_bytes(b"nothing")
    with pytest.raises((CallError, BundleError)) as caught:
        aotc.gang(bundle(2), weights=tmp_path / "weights.safetensors")
    assert "rank" not in str(caught.value).splitlines()[0]
    assert capfd.readouterr().err == ""


def test_a_rank_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr("aotc.vmfb.gang.rank_processes._CHILD", "import os, sys; os._exit(int(sys.argv[1]) and 9)")
    with pytest.raises(RankLost, match=r"rank 0 .* ended with status 9 while the gang started"):
        aotc.gang(bundle(2))


LOST = {rank: RankLost(2, "rank 2 (host, process 9) failed during all_reduce") for rank in (0, 1, 3)}


def test_the_cause_is_raised_and_not_its_consequences():
    assert cause({**LOST, 2: RankLost(2, "rank 2 was killed")}).args == ("rank 2 was killed\n  try: start all ranks "
        "again; values of donated arguments and of state are lost",)  # fmt: skip
    failed = cause({**LOST, 2: aotc.DeadlineExceeded("main", "late")})
    assert type(failed) is aotc.DeadlineExceeded
    assert str(failed) == "rank 2: main: error: late"
    same = CallError("main", "the same")
    assert str(cause(dict.fromkeys(range(4), same))) == str(same)
    assert cause({0: LOST[0]}).rank == 2


def test_a_lost_rank_in_a_call_of_a_module_is_a_rank_lost():
    links = thread_links(2)
    with aotc.load(bundle(2), ranks=links[0], threads=1) as module:
        links[1].close()
        with pytest.raises(RankLost, match="rank 1 closed the module") as caught:
            module(*module.shard(*arguments()))
    assert caught.value.rank == 1
