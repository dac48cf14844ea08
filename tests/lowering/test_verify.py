"""Faults planted in each stage of lowering are caught by --verify-each, and named with their stage and function."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.golden import FOLDER, sections

from aotc.diagnostics import InternalError
from aotc.ir.loop import ir as loop_ir
from aotc.ir.program.ir import Branch, Copy, Launch, Loop, walk
from aotc.ir.tensor.text import parse_module
from aotc.lowering import lower as stages
from aotc.lowering.program import dependences
from aotc.lowering.program.schedule import CommandBuffer, CommandBufferEncoder
from aotc.options import Options
from aotc.targets import resolve_targets
from aotc.vmfb.isa import BY_NAME

pytestmark = pytest.mark.ir

OPTIONS = Options(target="cpu:x86-64-v4", verify_each=True)
(TARGET,) = resolve_targets(OPTIONS.target)


def lower(case, **options):
    module = parse_module(sections(FOLDER / "program" / f"{case}.txt")[1])
    return stages.lower(module, TARGET, replace(OPTIONS, **options))


def plant(monkeypatch, name, fault):
    """Let a stage of ``lower`` give what ``fault`` makes of its result."""
    stage = getattr(stages, name)
    monkeypatch.setattr(stages, name, lambda *args, **kwargs: fault(stage(*args, **kwargs)))


def caught(case, message):
    """The fault is found where verify_each is on, and only there."""
    with pytest.raises(InternalError, match=message):
        lower(case)
    lower(case, verify_each=False)


# ---------------------------------------------------------------- lower_region


def changed(kernel, change):
    """Return the kernel with ``change`` made to its stores."""

    def block(body):
        return tuple(new for s in body for new in statement(s))

    def statement(s):
        match s:
            case loop_ir.Store():
                return change(s)
            case loop_ir.For():
                return [replace(s, body=block(s.body))]
        return [s]

    return replace(kernel, body=block(kernel.body))


FAULTS_OF_KERNELS = {
    "a wrong index": (lambda s: [replace(s, index=tuple(i + 3 for i in s.index))], "never below|reaches beyond"),
    "a missing index": (lambda s: [replace(s, index=())], "has 1 dims, the index has 0"),
    "a wrong dtype": (lambda s: [replace(s, value=loop_ir.Const(1, "i32"))], "the value is i32, the buffer f32"),
    "an unknown op": (lambda s: [replace(s, value=loop_ir.Apply("tan_h", (s.value,), "f32"))], "unknown scalar op"),
    "an unknown name": (lambda s: [replace(s, value=loop_ir.Var("q", "f32"))], "scalar q is not defined"),
}


@pytest.mark.parametrize("fault", FAULTS_OF_KERNELS)
def test_the_verifier_finds_each_kernel_fault(monkeypatch, fault):
    change, message = FAULTS_OF_KERNELS[fault]
    plant(monkeypatch, "lower_region", lambda kernel: changed(kernel, change))
    caught("one_kernel", rf"after lower_region of k0_tanh: .*({message})")


def test_the_verifier_finds_an_unwritten_output(monkeypatch):
    plant(monkeypatch, "lower_region", lambda kernel: changed(kernel, lambda s: []))
    caught("one_kernel", "after lower_region of k0_tanh: .*output o0 is never written")


# ---------------------------------------------------------------- bufferize


def edited(steps, edit):
    """Return the steps with ``edit(step) -> steps`` made to each, in loops and branches too."""
    found = []
    for step in steps:
        match step:
            case Loop(predicate, cond, body):
                step = Loop(predicate, edited(cond, edit), edited(body, edit))
            case Branch(index, branches):
                step = Branch(index, tuple(edited(b, edit) for b in branches))
        found += edit(step)
    return tuple(found)


def without(kind, part):
    """Return an edit that leaves out steps of a kind with ``part`` in the kernel's name."""
    return lambda s: [] if isinstance(s, kind) and part in getattr(getattr(s, "kernel", None), "name", "") else [s]


def launches(change):
    return lambda s: [change(s)] if isinstance(s, Launch) else [s]


FAULTS_OF_STEPS = {
    "a launch left out": ("chain_shares_memory", without(Launch, "k0"), "k1_tanh reads .* does not hold"),
    "a copy left out": ("loop", without(Copy, ""), "does not hold what was written"),
    "a result that nobody writes": ("one_kernel", without(Launch, "k0"), "nothing writes result 0"),
    "a condition that nobody computes": ("loop", without(Launch, "k1"), "loop reads .* does not hold"),
    "an index that nobody computes": ("branches", without(Launch, "k0"), "branch reads .* does not hold"),
    "an update of what is not there": ("update_in_place", without(Launch, "k0"), "reads .* does not hold"),
    "a kernel without its operand": (
        "chain_shares_memory",
        launches(lambda s: replace(s, reads=s.reads[1:])),
        "the kernel has",
    ),
    "an argument that is written": (
        "one_kernel",
        launches(lambda s: replace(s, writes=s.reads)),
        "writes to argument 0",
    ),
    "a copy of too much": (
        "argument_and_constant_returned",
        lambda s: [replace(s, size=s.size + 4)] if isinstance(s, Copy) else [s],
        "bytes, expected",
    ),
    "an alias that is none": (
        "chain_shares_memory",
        lambda s: [replace(s, reads=(s.writes[0], *s.reads[1:]))] if "k2" in getattr(s, "kernel", s).name else [s],
        "may not be one",
    ),
}


@pytest.mark.parametrize("fault", FAULTS_OF_STEPS)
def test_the_verifier_finds_each_step_fault(monkeypatch, fault):
    case, edit, message = FAULTS_OF_STEPS[fault]
    plant(monkeypatch, "bufferize", lambda b: replace(b, steps=edited(b.steps, edit)))
    with pytest.raises(InternalError, match=f"after bufferize of main: .*{message}"):
        lower(case)


def test_the_verifier_finds_a_size_read_in_a_loop(monkeypatch):
    """Nothing can read a size in the middle of a command buffer."""

    def nest(b):
        (bind,) = (s for s in b.steps if getattr(s, "dtype", "") and "value_0" in str(s.dim))
        inside = tuple(Branch(bind.value, ((s,),)) if s is bind else s for s in b.steps)
        return replace(b, steps=inside)

    plant(monkeypatch, "bufferize", nest)
    with pytest.raises(InternalError, match=r"after bufferize of main: .*stands inside a loop or branch"):
        lower("size_from_memory")


def test_the_verifier_finds_a_size_used_before_it_is_known(monkeypatch):
    plant(monkeypatch, "bufferize", lambda b: replace(b, steps=b.steps[-3:] + b.steps[:-3]))
    with pytest.raises(InternalError, match=r"after bufferize of main: .*value_0_dim has no value here"):
        lower("size_from_memory")


# ---------------------------------------------------------------- plan_memory


def swapped(arena):
    """Swap the offsets of two storages of different sizes that are alive together."""
    pairs = [(s, t) for s in arena for t in arena if s.size != t.size and s.first <= t.last and t.first <= s.last]
    s, t = pairs[0]
    s.offset, t.offset = t.offset, s.offset


def moved(by):
    def move(arena):
        arena[-1].offset += by

    return move


def all_at_once(arena):
    for s in arena:
        s.offset = 0


FAULTS_OF_PLANS = {
    "two offsets swapped": ("loop_within_a_branch", swapped, "share bytes|not inside"),
    "a storage at an odd place": ("chain_shares_memory", moved(4), "not aligned to 64"),
    "a storage behind the end": ("chain_shares_memory", moved(64), "not inside the arena"),
    "one place for all": ("loop", all_at_once, "alive together and share bytes"),
    "one place for all sizes": ("symbolic_sizes", all_at_once, "alive together and share bytes"),
}


def plan(monkeypatch, fault, lives=False):
    function = stages.plan_stages

    def planted(arena, *rest):
        totals = function(arena, *rest)
        fault(arena)
        for s in arena if lives else ():
            s.first = s.last = -1
        return totals

    monkeypatch.setattr(stages, "plan_stages", planted)


@pytest.mark.parametrize("fault", FAULTS_OF_PLANS)
def test_the_verifier_finds_each_memory_plan_fault(monkeypatch, fault):
    case, change, message = FAULTS_OF_PLANS[fault]
    plan(monkeypatch, change)
    caught(case, f"after plan_memory of main: .*({message})")


def test_the_verifier_finds_wrong_live_ranges(monkeypatch):
    """Lives that bufferize recorded wrong are no excuse."""

    def spread(arena):
        for n, s in enumerate(arena):
            s.first = s.last = n

    function = stages.plan_stages
    monkeypatch.setattr(stages, "plan_stages", lambda arena, *rest: (spread(arena), function(arena, *rest))[1])
    caught("loop_within_a_branch", "after plan_memory of main: .*(does not hold what was written|is written over)")


# ---------------------------------------------------------------- schedule


def test_the_verifier_finds_a_missing_edge(monkeypatch):
    edges = CommandBufferEncoder._command_predecessors
    monkeypatch.setattr(
        CommandBufferEncoder, "_command_predecessors", lambda self, steps: [[] for _ in edges(self, steps)]
    )
    caught("chain_shares_memory", "after schedule of main: launch of k1_tanh does not wait for launch of k0_matmul")


@pytest.mark.parametrize(("side", "case"), [("read", "loop_within_a_branch"), ("write", "update_of_an_argument")])
def test_the_verifier_finds_a_missed_hazard(monkeypatch, side, case):
    """Readers wait for writers, and writers for writers."""
    note = getattr(dependences.MemoryAccesses, side)
    monkeypatch.setattr(dependences.MemoryAccesses, side, lambda self, s, n: list(note(self, s, n))[:0])
    caught(case, "after schedule of main: .* does not wait for")


def test_the_verifier_finds_a_missing_command(monkeypatch):
    encode = CommandBufferEncoder.encode
    monkeypatch.setattr(CommandBufferEncoder, "encode", lambda self, steps: encode(self, steps[1:]))
    caught("chain_shares_memory", "after schedule of main: launch of k4_reduce_window has no command")


def test_the_verifier_finds_a_truncated_command_buffer(monkeypatch):
    encode = CommandBufferEncoder.encode

    def broken(self, steps):
        buffer = encode(self, steps)
        return CommandBuffer(buffer.code[:-1], buffer.states, buffer.parameters)

    monkeypatch.setattr(CommandBufferEncoder, "encode", broken)
    caught("chain_shares_memory", "after schedule of main: word 0")


def test_the_verifier_finds_a_wrong_slot(monkeypatch):
    place = CommandBufferEncoder.place
    monkeypatch.setattr(CommandBufferEncoder, "place", lambda self, *part: [place(self, *part)[0], 0])
    caught("chain_shares_memory", "after schedule of main: .*its places are")


# ---------------------------------------------------------------- emit_program


def test_the_verifier_finds_a_register_out_of_range(monkeypatch):
    def fewer(program):
        program.registers -= 1
        return program

    plant(monkeypatch, "emit_program", fewer)
    caught("chain_shares_memory", "after emit_program of main: instruction .*is not below")


def test_the_verifier_finds_an_endless_host_program(monkeypatch):
    def endless(program):
        assert program.code.pop() == [BY_NAME["return"].opcode]
        return program

    plant(monkeypatch, "emit_program", endless)
    caught("one_kernel", "after emit_program of main: the program does not end with return")


def test_golden_programs_contain_every_kind_of_step():
    """The cases hold every kind of step."""
    cases = sorted((FOLDER / "program").glob("*.txt"))
    kinds = {type(s).__name__ for c in cases for b in lower(c.stem).steps.values() for s in walk(b.steps)}
    assert kinds == {"Launch", "Copy", "Loop", "Branch", "Bind", "Check"}
