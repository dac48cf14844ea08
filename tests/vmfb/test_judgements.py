"""Assertions on memory are part of a plan: the errors are those of an interpreted program, and memory comes back."""

import threading

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.assembly import assemble
from aotc.vmfb.bundle import write_bundle
from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.arena import ARENAS
from aotc.vmfb.module import load
from aotc.vmfb.verify.plan_recorder import is_plan_possible

pytestmark = pytest.mark.ir

MAIN = "const r0, 4 \n result res0, [r0] \n submit cb0, [] \n"
START = "const r0, 64 \n arena r0 \n result res0, [] \n submit cb2, [] \n const r1, 0"
BYTE = "load_scalar r3, slot0, r1, %i1 \n"
CHECKED = f"""{START}
    load_scalar r2, slot1, r1, %i64
    {BYTE} assert_true r3, "stopped at {{0}} of {{1}}", [r2, r0]
    const r4, 1
    load_scalar r3, slot0, r4, %u8
    assert_true r3, "no second byte", []
    return"""


def changed(name, text):
    """The tiny bundle with another program for a function."""
    manifest, segments = tiny.parts()
    manifest["variants"][0]["functions"][name] = {"registers": 5, "code": assemble(text)}
    return load(write_bundle(None, manifest, segments), threads=1)


@pytest.fixture(scope="module")
def module():
    return changed("count", CHECKED)


def interpreted(module, limit):
    """Call as a program without a plan is called."""
    return module._functions["count"]._interpret([np.asarray(np.int64(limit))], [None])


def failure(call, *arguments):
    with pytest.raises(CallError) as caught:
        call(*arguments)
    return str(caught.value)


def test_assertions_that_hold_are_silent(module):
    assert module._functions["count"]._planned
    for limit in (0x101, 0x3FF, 0x1FF):
        assert module.count(np.int64(limit)) == limit == interpreted(module, limit)[0]


def test_submissions_after_a_failed_check_do_not_run():
    """The check of an argument comes first: the buffer of the result is as it was."""
    text = f"""const r0, 64 \n arena r0 \n result res0, [] \n const r1, 0
        {BYTE} assert_true r3, "no first byte", []
        submit cb2, [] \n return"""
    module = changed("count", text)
    assert module._functions["count"]._planned
    out = np.array(-1, np.int64)
    with pytest.raises(CallError, match="no first byte"):
        module.invoke("count", np.int64(0x100), out=[out])
    assert out == -1
    module.invoke("count", np.int64(0x101), out=[out])
    assert out == 0x101


@pytest.mark.parametrize(("limit", "message"), [(0x300, "stopped at 768 of 64"), (3, "no second byte"), (0, "stopped")])
def test_the_first_that_fails_is_raised(module, limit, message):
    found = failure(module.count, np.int64(limit))
    assert message in found
    assert found == failure(interpreted, module, limit)


def test_a_failure_gives_its_memory_back(module):
    module.count(np.int64(0x101))
    before = ARENAS.idle_bytes()
    out = np.zeros((), np.int64)
    for _ in range(3):
        assert "no second byte" in failure(lambda: module.invoke("count", np.int64(7), out=[out]))
        assert ARENAS.idle_bytes() == before
    assert module.count(np.int64(0x101)) == 0x101


@pytest.mark.parametrize("at", range(16))
def test_a_condition_is_its_byte_alone(at):
    module = changed("main", f'{MAIN} const r1, {at} \n {BYTE} assert_true r3, "zero", [] \n return')
    x, y = np.zeros(16, np.uint8), np.zeros(4, np.float32)
    x[at] = 0x80
    module.main(x.view(np.float32), y)
    others = np.where(x, 0, 255).astype(np.uint8).view(np.float32)
    assert "zero" in failure(module.main, others, y)


def test_failures_of_one_thread_are_not_those_of_another(module):
    wrong: list[object] = []

    def repeat(limit, fails):
        for _ in range(200):
            try:
                if module.count(np.int64(limit)) != limit or fails:
                    wrong.append(limit)
            except CallError:
                if not fails:
                    wrong.append(limit)

    threads = [threading.Thread(target=repeat, args=row) for row in ((0x101, 0), (0x100, 1), (0x111, 0), (0x1, 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


LOADED = f"{START} \n {BYTE}"
PLANNED = {
    "no load": (True, f"{START} \n return"),
    "a condition": (True, f'{LOADED} assert_true r3, "x", [r3, r1] \n return'),
    "a value that nobody uses": (True, f"{LOADED} return"),
    "another register is computed": (True, f'{LOADED} add r2, r0, r0 \n assert_true r3, "x", [r2] \n return'),
    "a submission behind it": (True, f'{LOADED} assert_true r3, "x", [] \n submit cb2, [] \n return'),
    "arithmetic": (False, f'{LOADED} add r2, r3, r0 \n assert_true r3, "x", [] \n return'),
    "a condition of several bytes": (
        False, f'{START} \n load_scalar r3, slot0, r1, %i32 \n assert_true r3, "x", [] \n return'
    ),
    "a register of both": (
        False, f'{LOADED} load_scalar r3, slot0, r1, %i32 \n assert_true r3, "x", [] \n return'
    ),
    "a message of another condition": (False, f'{LOADED} assert_true r0, "x", [r3] \n return'),
    "a size": (False, f"const r1, 0 \n {BYTE} arena r3 \n return"),
    "an offset": (False, f"{LOADED} load_scalar r2, slot0, r3, %i1 \n return"),
    "a branch": (False, f"{LOADED} branch_if r3, @8 \n const r2, 0 \n return"),
    "a register that is overwritten": (False, f'{LOADED} const r3, 0 \n assert_true r3, "x", [] \n return'),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANNED)
def test_which_programs_have_a_plan(name):
    planned, text = PLANNED[name]
    assert is_plan_possible(assemble(text)) is planned
