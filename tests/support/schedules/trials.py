"""Trials of the executor in tests: random schedules, slow participants, and a check of the order of execution.

The check ignores the edges. It reads the byte ranges of each command from the manifest, and its times from the claims:
of two commands of a graph that access the same bytes, at least one as a write, the first in the command buffer must
end before the other begins. The order of the command buffer is that of a single thread. Loops and branches that are
commands access the bytes that their inner commands access. Where commands wait for tiles of others, only results and
the number of runs of each item are checked.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations, pairwise

import aotc
from aotc.vmfb.abi import COPY, Control, Graph, operand_value
from aotc.vmfb.commands import all_commands, all_nodes
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.devices.cpu.executor_trials import Trial


@contextmanager
def trial(claims: int = 0) -> Iterator[Trial]:
    """Run all calls of the ``with`` block in a trial."""
    made = Trial(claims)
    native.set_trial(made.address)
    try:
        yield made
    finally:
        native.set_trial(0)


class Watched:
    """A loaded bundle that records its submissions: the byte ranges that each command accesses."""

    def __init__(self, data: bytes, threads: int) -> None:
        self.module = aotc.load(data, threads=threads)
        self.executable = self.module._executable
        self.submissions: list = []
        plain = self.executable._native_call

        def call(buffer, slots, parameters, *others):
            number = next(n for n, known in enumerate(self.executable._buffers) if known is buffer)
            self.submissions.append((number, slots, tuple(parameters)))
            return plain(buffer, slots, parameters, *others)

        self.executable._native_call = call

    def calls(self, arguments):
        """Call it once, so that its submissions are recorded."""
        self.module.invoke("main", *arguments)
        return self

    def nodes(self):
        """Yield the nodes of each submission, with the slots and parameters of their numbers."""
        for number, slots, parameters in self.submissions:
            first = self.executable._buffers[number].address
            for node in all_nodes(self.executable.nodes(number)):
                yield node, first, slots, parameters

    def graphs(self, tiled=False):
        """Yield for each graph its commands by the addresses of their words, without those that wait for tiles."""
        for node, first, slots, parameters in self.nodes():
            if isinstance(node, Graph) and (tiled or not node.tiled):
                yield {first + 8 * c.at: (c, slots, parameters) for c in node.commands}

    def touched(self, command, slots, parameters):
        """Return the byte ranges that a command reads and those that it writes, as lists of (begin, end)."""
        if isinstance(command, Control):
            places = [node.place for node in all_nodes(command.nodes) if not isinstance(node, Graph)]
            begins = [slots[slot] + operand_value(offset, parameters) for slot, offset in places]
            parts = [self.touched(c, slots, parameters) for c in all_commands(command.nodes)]
            reads = [(begin, begin + 1) for begin in begins] + [span for some, _ in parts for span in some]
            return reads, [span for _, some in parts for span in some]
        if command.kind == COPY:
            sizes, inputs = [operand_value(command.dims[0], parameters)] * 2, 1
        else:
            interface = self.executable.buffers.kernels[command.kernel]
            sizes = interface.evaluate_sizes([operand_value(word, parameters) for word in command.dims])[1]
            inputs = interface.inputs
        begins = [slots[slot] + operand_value(offset, parameters) for slot, offset in command.places]
        spans = [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]
        return spans[:inputs], spans[inputs:]

    def conflicts(self):
        """Return pairs of addresses of commands: the first must end before the second begins."""
        found = []
        for commands in self.graphs():
            spans = {at: self.touched(*row) for at, row in commands.items()}
            for a, b in combinations(sorted(commands), 2):  # addresses grow with the order of the program
                (reads, writes), (later_reads, later_writes) = spans[a], spans[b]
                if meet(writes, later_reads + later_writes) or meet(reads, later_writes):
                    found.append((a, b))
        return found

    def items(self):
        """Return the items of each command by its address."""
        every = [row for commands in self.graphs(tiled=True) for row in commands.items()]
        return {
            at: 1 if isinstance(command, Control) else operand_value(command.items, parameters)
            for at, (command, _, parameters) in every
        }

    @property
    def overlaps(self):
        """Return True if loops or branches are commands: then graphs of one call run concurrently."""
        graphs = [node for node, *_ in self.nodes() if isinstance(node, Graph)]
        return any(len(graph.leaves) < len(graph.commands) for graph in graphs)


def meet(spans, others):
    """Return True if one of the spans overlaps one of the others."""
    return any(a < d and c < b for a, b in spans for c, d in others)


def check_order(claims, conflicts, items, in_turn=True):
    """Assert for one call that each item of a graph runs once, in the order of dependences, and graphs in turn."""
    runs = defaultdict(list)
    for claim in claims:
        runs[claim.run].append(claim)
    for rows in runs.values():
        ran = Counter()
        begins, ends = {}, {}
        for row in rows:
            ran.update((row.command, n) for n in range(row.first, row.last))
            begins[row.command] = min(begins.get(row.command, row.began), row.began)
            ends[row.command] = max(ends.get(row.command, row.ended), row.ended)
        assert set(ran.values()) == {1}, "an item ran more than once"
        assert len(ran) == sum(items[at] for at in begins), "an item did not run"
        for a, b in conflicts:
            if a in begins and b in begins:
                assert ends[a] < begins[b], "a command ran before one that it depends on had ended"
    for before, after in pairwise([runs[number] for number in sorted(runs)] if in_turn else []):
        assert max(row.ended for row in before) < min(row.began for row in after), "graphs ran at the same time"


OPS = ("add", "multiply", "subtract", "maximum")


def random_dag(seed: int, ops: int = 24, size: int = 24) -> str:
    """Return a model of elementwise ops and matmuls that read random earlier values."""
    rng = random.Random(seed)
    kind = f"tensor<{size}x{size}xf32>"
    lines, names, unread = [], ["%a", "%b"], set()
    for n in range(ops):
        x, y = rng.choice(names[-12:]), rng.choice(names)
        unread -= {x, y}
        if rng.random() < 0.3:
            product = f"stablehlo.dot_general {x}, {y}, contracting_dims = [1] x [0] : ({kind}, {kind}) -> {kind}"
            lines.append(f"%d{n} = {product}")
            lines.append(f"%v{n} = stablehlo.tanh %d{n} : {kind}")
        else:
            lines.append(f"%v{n} = stablehlo.{rng.choice(OPS)} {x}, {y} : {kind}")
        names.append(f"%v{n}")
        unread.add(names[-1])
    results = sorted(unread)
    body = "\n  ".join(lines)
    kinds = ", ".join([kind] * len(results))
    end = f"return {', '.join(results)} : {kinds}"
    return f"func.func public @main(%a: {kind}, %b: {kind}) -> ({kinds}) {{\n  {body}\n  {end}\n}}\n"
