"""Reference interpreter for the program of a rank: all ranks as threads, collectives by the specification."""

import threading
from collections import Counter

import numpy as np

from aotc.ir.semantics.run import Hooks, interpret
from aotc.vmfb.ranks.layout import RANK_CALL, mesh_of, slices_of_rank

FUNCTIONS = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or
}  # fmt: skip


class Board:
    """Arrays that the ranks provide for each exchange."""

    def __init__(self):
        self.changed, self.put, self.failed = threading.Condition(), {}, False

    def exchange(self, key, rank, group, arrays):
        with self.changed:
            self.put[key, rank] = arrays
            self.changed.notify_all()
            whole = self.changed.wait_for(lambda: self.failed or all((key, r) in self.put for r in group), 60)
            assert whole, f"rank {rank} waits for others at {key}"
            assert not self.failed
            return [self.put[key, r] for r in group]


class Rank:
    """One rank, with its number of exchanges with each group."""

    def __init__(self, rank, size, board):
        self.rank, self.size, self.board, self.count = rank, size, board, Counter()

    def collective(self, op, operands, types):
        if op.name == "partition_id":
            return [np.array(self.rank, np.uint32)]
        reduction = op.regions[0].ops[0].name if op.regions else ""
        return self.answer(op.name, op.attrs, operands, reduction)

    def custom_call(self, op, operands, types):
        name, facts = op.attrs["target"].removeprefix(RANK_CALL), op.attrs["config"]
        if name == "partition_id":
            return [np.array(self.rank, np.uint32)]
        found = self.answer(name, facts, operands[:-1], facts.get("reduction", ""))
        return [*found, np.zeros((), np.uint32)]

    def answer(self, name, facts, operands, reduction):
        if name == "collective_permute":
            every = self._put("pairs", range(self.size), operands)
            source = [s for s, t in facts["pairs"] if t == self.rank]
            return every[source[0]] if source else [np.zeros_like(x) for x in operands]
        group = next(tuple(g) for g in facts["groups"] if self.rank in g)
        every = self._put(group, group, operands)
        me, n = group.index(self.rank), len(group)
        found = []
        for arrays in zip(*every, strict=True):
            if name in ("all_reduce", "reduce_scatter"):
                x = arrays[0]
                for other in arrays[1:]:
                    x = FUNCTIONS[reduction](x, other)
                found.append(x if name == "all_reduce" else np.split(x, n, facts.get("dim", 0))[me])
            elif name == "all_gather":
                found.append(np.concatenate(arrays, facts.get("dim", 0)))
            elif name == "collective_broadcast":
                found.append(arrays[0])
            else:
                parts = [np.split(x, n, facts.get("split_dim", 0))[me] for x in arrays]
                found.append(np.concatenate(parts, facts.get("concat_dim", 0)))
        return found

    def _put(self, name, group, operands):
        self.count[name] += 1
        return self.board.exchange((name, self.count[name]), self.rank, group, operands)


def interpret_ranks(module, arrays):
    """Return the results of each rank, for whole arrays."""
    ranks = module.functions["main"].attrs["ranks"]
    mesh = mesh_of(ranks["mesh"])
    board, results = Board(), [None] * mesh.size
    params = module.functions["main"].body.params

    def run(rank):
        try:
            rows = zip(arrays, params, ranks["arguments"], strict=True)
            own = [x[slices_of_rank(mesh, layout, rank, p.type.shape)] for x, p, layout in rows]
            one = Rank(rank, mesh.size, board)
            hooks = Hooks(custom_call=one.custom_call, collective=one.collective)
            results[rank] = interpret(module, *own, hooks=hooks)
        except BaseException as error:
            results[rank] = error
            with board.changed:
                board.failed = True
                board.changed.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(mesh.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in results:
        if isinstance(error, BaseException):
            raise error
    return results
