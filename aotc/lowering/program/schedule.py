"""Steps to a command buffer: graphs of commands with dependency edges, loops, branches.

Two commands depend on each other if one writes bytes that the other touches; the
edges are what is left of that after dropping those that others imply. The
encoding is that of ``vmfb.abi``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotc.ir.dims import Dim, Expr, sym
from aotc.ir.dims_symbols import evaluate, symbols
from aotc.ir.opset import CONTRACT
from aotc.ir.program_ir import Branch, Check, Copy, Launch, Loop, Step, Storage
from aotc.lowering.program.dependences import Memory
from aotc.vmfb.abi import CASE, COPY, DISPATCH, GRAPH, GRAPH_HEADER, WHILE, constant, parameter

CLAIM_NS = 5_000
SERIAL_NS = 6_000
SYMBOL_GUESS = 16
MAX_CLAIMS = 64


@dataclass
class CommandBuffer:
    """Code and what it needs: parameters are expressions over the function's dims."""

    code: list[int]
    states: int
    parameters: list[Dim]


class Scheduler:
    """Encodes the steps of one function.

    Parameters
    ----------
    slot_of : callable
        Slot number of a storage.
    kernel_number : callable
        Number of a kernel in the bundle by name.
    """

    def __init__(self, slot_of: Callable[[Storage], int], kernel_number: Callable[[str], int]) -> None:
        self.slot_of, self.kernel_number = slot_of, kernel_number
        self.parameters: list[Dim] = []
        self.states = 0

    def encode(self, steps: Sequence[Step]) -> CommandBuffer:
        """Return the command buffer of ``steps``; checks are the host program's."""
        code = self._nodes([s for s in steps if not isinstance(s, Check)])
        return CommandBuffer(code, self.states, self.parameters)

    def operand(self, value: Dim) -> int:
        """Return the operand word of a number that may depend on the call."""
        if not isinstance(value, Expr):
            return constant(int(value))
        if value not in self.parameters:
            self.parameters.append(value)
        return parameter(self.parameters.index(value))

    def place(self, s: Storage) -> list[int]:
        """Return the two words of a place."""
        offset: Dim = s.number if s.kind == "constant" else s.offset if s.kind == "arena" else 0
        return [self.slot_of(s), self.operand(offset)]

    def _nodes(self, steps: Sequence[Step]) -> list[int]:
        code: list[int] = []
        run: list[Launch | Copy] = []
        for step in steps:
            if isinstance(step, Launch | Copy):
                run.append(step)
                continue
            if run:
                code += self._graph(run)
                run = []
            if isinstance(step, Loop):
                code += self._loop(step)
            elif isinstance(step, Branch):
                code += self._branch(step)
        return code + (self._graph(run) if run else [])

    def _loop(self, step: Loop) -> list[int]:
        cond, body = self._nodes(step.cond), self._nodes(step.body)
        head = [len(cond), len(body), *self.place(step.predicate)]
        return [WHILE, 2 + len(head) + len(cond) + len(body), *head, *cond, *body]

    def _branch(self, step: Branch) -> list[int]:
        branches = [self._nodes(b) for b in step.branches]
        head = [len(branches), *self.place(step.index), *(len(b) for b in branches)]
        words = 2 + len(head) + sum(map(len, branches))
        return [CASE, words, *head, *(w for b in branches for w in b)]

    def _graph(self, steps: Sequence[Launch | Copy]) -> list[int]:
        preds = self._edges(steps)
        succs: list[list[int]] = [[] for _ in steps]
        for n, ps in enumerate(preds):
            for p in ps:
                succs[p].append(n)
        commands = [self._command(s, len(preds[n]), succs[n]) for n, s in enumerate(steps)]
        state, self.states = self.states, self.states + len(steps)
        cost = sum(nanoseconds(s) for s in steps)
        offsets = []
        at = GRAPH_HEADER + len(steps)
        for c in commands:
            offsets.append(at)
            at += len(c)
        return [GRAPH, at, len(steps), state, int(cost < SERIAL_NS), *offsets, *(w for c in commands for w in c)]

    def _command(self, step: Launch | Copy, preds: int, succs: list[int]) -> list[int]:
        if isinstance(step, Copy):
            places = [*self.place(step.source), *self.place(step.target)]
            return [
                COPY,
                0,
                constant(1),
                constant(1),
                preds,
                len(succs),
                2,
                1,
                *succs,
                *places,
                self.operand(step.size),
            ]
        kernel = step.kernel
        places = [w for s in (*step.reads, *step.writes) for w in self.place(s)]
        dims = [self.operand(self._dim(name)) for name in kernel.dims]
        head = [DISPATCH, self.kernel_number(kernel.name), self.operand(kernel.grid), constant(grain(step))]
        return [*head, preds, len(succs), len(places) // 2, len(dims), *succs, *places, *dims]

    def _dim(self, name: str) -> Dim:
        return sym(name)

    def _edges(self, steps: Sequence[Launch | Copy]) -> list[list[int]]:
        """Return the direct predecessors of every command."""
        memory = Memory()
        before: list[int] = []  # bit sets: the commands that are done when this one begins
        result: list[list[int]] = []
        for n, step in enumerate(steps):
            reads = step.reads if isinstance(step, Launch) else (step.source,)
            writes = step.writes if isinstance(step, Launch) else (step.target,)
            found = {p for s in reads for p in memory.read(s, n)} | {p for s in writes for p in memory.write(s, n)}
            bits = 0
            direct = []
            for p in sorted(found - {n}, reverse=True):
                if not bits >> p & 1:
                    direct.append(p)
                    bits |= before[p] | 1 << p
            before.append(bits)
            result.append(direct[::-1])
        return result


def _guess(value: Dim) -> int:
    return (
        int(evaluate(value, {s.name: SYMBOL_GUESS for s in symbols(value)})) if isinstance(value, Expr) else int(value)
    )


def nanoseconds(step: Launch | Copy) -> float:
    """Return a rough time of a command on one core: arithmetic against memory traffic."""
    if isinstance(step, Copy):
        return 50 + _guess(step.size) / 16
    product_like = any(name in step.kernel.name for name in CONTRACT)
    return 100 + max(_guess(step.kernel.flops) / (60 if product_like else 8), _guess(step.kernel.bytes) / 20)


def grain(step: Launch) -> int:
    """Return how many grid items to claim at once: each claim worth some microseconds."""
    items = max(_guess(step.kernel.grid), 1)
    claims = max(1, min(items, MAX_CLAIMS, int(nanoseconds(step) // CLAIM_NS)))
    return -(-items // claims)
