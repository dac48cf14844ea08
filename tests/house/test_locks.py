"""Every lock of the runtime is in the list of those that a forked child finds free."""

import ast
from pathlib import Path

import pytest

from aotc.vmfb.host import locks

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
OWNER = "aotc/vmfb/host/locks.py"
MAKERS = ("Lock", "RLock", "allocate_lock", "Condition", "Semaphore", "BoundedSemaphore", "Event", "Barrier")

# Locks outside of the runtime, which renew themselves or live as long as a simulated block: (file, maker).
SIMULATOR = "aotc/kernels/cuda/block.py"
OTHER = {
    *(("aotc/kernels/jobs/pool.py", name) for name in ("Lock", "Semaphore")),
    ("aotc/kernels/jobs/run.py", "Condition"),
    ("aotc/kernels/loop_addresses.py", "Condition"),
    *((SIMULATOR, name) for name in ("Barrier", "Condition", "Lock")),
}


def makers(tree):
    """Yield the names under which a module takes what makes locks."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="threading" | "_thread" | "multiprocessing" | "queue", names=names):
                yield from (alias.name for alias in names if alias.name in MAKERS)
            case ast.Attribute(value=ast.Name(id="threading" | "_thread" | "multiprocessing"), attr=name):
                if name in MAKERS:
                    yield name


def test_locks_are_made_only_by_the_locks_module():
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in ("aotc", "cli")
        for path in (ROOT / folder).rglob("*.py")
        for name in makers(ast.parse(path.read_text()))
    }
    found = {row for row in found if row[0] != OWNER}
    assert found - OTHER == set(), "make it with aotc.vmfb.host.locks, so that a forked child finds it free"
    assert found >= OTHER


@pytest.mark.parametrize("make", [locks.new_lock, locks.new_recursive_lock])
def test_a_lock_is_free_in_a_forked_child(make):
    lock = make()
    lock.acquire()
    assert lock in locks.LOCKS
    locks._renew_locks()
    assert lock.acquire(blocking=False)
