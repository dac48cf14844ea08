"""What the runtime shares with its process: forks at any moment, plans of many threads, files of dropped modules."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.host.release import Release
from aotc.vmfb.limits import EAGER_BYTES, PLANS
from aotc.vmfb.memory.arena import ArenaPool
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir


def run(code, *args, timeout=120):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout, check=False)


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "t.vmfb"
    file.write_bytes(tiny.bundle())
    return file


def test_more_shapes_than_plans_from_many_threads():
    """Each thread makes plans while the others drop the oldest."""
    module = load(tiny.bundle(), threads=1)
    switch = sys.getswitchinterval()
    wrong = []

    def work(first):
        try:
            for n in range(first, first + 8 * PLANS):
                x = np.arange(n, dtype=np.float32)
                if not np.array_equal(module.invoke("grow", x)[0], x * 6):
                    wrong.append(n)
        except BaseException as error:
            wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(4 + n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []
    assert len(module._functions["grow"]._plans) <= PLANS


class _Interrupted(dict):
    """Plans: who looks for the oldest is interrupted by ``other``, which makes one until it has dropped the oldest."""

    other = None

    def __init__(self):
        self.dropped, self.go_on = threading.Event(), threading.Event()

    def __iter__(self):
        found = super().__iter__()
        if self.other is not None and threading.current_thread() is not self.other:
            self.other.start()
            self.dropped.wait(0.2)
        return found

    def __setitem__(self, shapes, plan):
        if threading.current_thread() is self.other:
            self.dropped.set()
            self.go_on.wait(0.2)
        super().__setitem__(shapes, plan)


def test_a_plan_is_made_while_the_oldest_is_looked_for():
    function = load(tiny.bundle(), threads=1)._functions["grow"]
    plans = function._plans = _Interrupted()
    for n in range(4, 4 + PLANS):
        function.call([np.ones(n, np.float32)])
    plans.other = threading.Thread(target=function.call, args=([np.ones(2000, np.float32)],))
    function.call([np.ones(3000, np.float32)])
    plans.go_on.set()
    plans.other.join()
    assert {(2000,), (3000,)} <= {shapes[0] for shapes in list(dict.keys(plans))}
    assert len(plans) == PLANS


def test_arenas_are_trimmed_while_others_take_them():
    pool = ArenaPool()
    done = threading.Event()
    failed = []

    def take():
        while not done.is_set():
            pool.return_arena(pool.take_arena(64))

    def trim():
        try:
            for _ in range(2000):
                pool.trim()
        except BaseException as error:
            failed.append(error)
        done.set()

    threads = [threading.Thread(target=f) for f in (take, take, trim)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


FORK = """
import os, sys, threading, time
import aotc, numpy as np
from aotc.vmfb.host.locks import LOCKS
module = aotc.load(sys.argv[1], threads=2)
x = np.ones(4, np.float32)
held = threading.Barrier(2)
go = threading.Event()

def hold():
    for lock in list(LOCKS):
        lock.acquire()
    held.wait()
    go.wait()

threading.Thread(target=hold, daemon=True).start()
held.wait()
child = os.fork()
if not child:
    good = aotc.load(sys.argv[1], threads=2).invoke("grow", x)[0].tolist() == [6] * 4
    os._exit(not good)
assert os.waitpid(child, 0)[1] == 0
go.set()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_every_lock_is_held(path):
    ended = run(FORK, path)
    assert ended.returncode == 0, ended.stderr


# The bundle is held through a path of each kind: the mapped file, the library's descriptor and its mapping.
DROP = """
import gc, os, sys
gc.disable()
import aotc, numpy as np

def link(n):
    try:
        return os.readlink(f"/proc/self/fd/{n}")
    except OSError:  # the listing's own
        return ""

def files():
    links = [found for n in os.listdir("/proc/self/fd") if (found := link(n))]
    with open("/proc/self/maps") as f:
        maps = [line.split(maxsplit=5)[-1].strip() for line in f]
    return sorted({x for x in links + maps if "memfd:aotc" in x or "t.vmfb" in x}), len(links)

def use():
    x = np.ones(4, np.float32)
    module = aotc.load(sys.argv[1], threads=2)
    assert module(x, x).tolist() == [2] * 4
    for name, args in (("grow", (x,)), ("count", (3,)), ("upto", (3,)), ("update", (x, x)), ("pick", (0, x, x))):
        module.functions[name](*args)
    module.functions["main"](x=x, y=x)
    repr(module), module.stats(), module.trim()
    assert "t.vmfb" in str(files())

use()
first = files()
for _ in range(20):
    use()
print(files() == first, "t.vmfb" not in str(first), len(first[0]))
"""


def test_a_dropped_module_frees_its_files_without_the_collector(path):
    manifest, segments = tiny.parts(weights=tiny.constants(EAGER_BYTES + 64).tobytes())
    write_bundle(path, manifest, segments)  # large enough to be mapped
    ended = run(DROP, path)
    assert (ended.returncode, ended.stdout) == (0, "True True 1\n"), ended.stderr  # the executor stays


def test_two_modules_of_one_library_share_it_until_both_are_gone():
    x = np.ones(4, np.float32)
    first, second = load(tiny.bundle(), threads=1), load(tiny.bundle(), threads=1)
    library = weakref.ref(first._executable._library)
    assert second._executable._library is library()
    del first
    assert second(x, x).tolist() == [2] * 4
    gc.disable()
    try:
        del second
        assert library() is None
    finally:
        gc.enable()


def test_finalizers_use_no_module_globals(path):
    """It may run when the interpreter ends, after modules have lost their names: that was printed as an exception."""
    assert set(Release.__del__.__code__.co_names) == {"_function", "_arguments"}
    ended = run("import sys, aotc; held = aotc.load(sys.argv[1], threads=1)", path)
    assert (ended.returncode, ended.stderr) == (0, "")
