"""Collectives on every dtype for tests of ranks, their operands, and results by StableHLO's specification.

As a program it runs all cases on one rank, and prints a digest of each rank's results.
"""

import hashlib
import json
import sys
import threading

import numpy as np

from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.link import open_link
from aotc.vmfb.ranks.ranks import Ranks, ranks_from_environment

GROUPS = {
    4: (((0,), (1,), (2,), (3,)), ((0, 1), (2, 3)), ((3, 0), (1, 2)), ((2, 0, 3, 1),)),
    8: (
        tuple((r,) for r in range(8)), ((0, 4), (1, 5), (7, 3), (6, 2)), ((0, 1, 2), (5, 4, 3), (7, 6)),
        ((7, 5, 3, 1), (0, 2, 4, 6)), (),
    ),
}  # fmt: skip
PAIRS = {
    4: (((0, 1), (1, 2), (2, 3), (3, 0)), ((0, 0), (3, 1)), ((2, 3), (3, 2)), ()),
    8: (((0, 7), (7, 1), (3, 3)), tuple((r, (r + 3) % 8) for r in range(8))),
}
BITS = ("and", "or")
ORDERED = ("max", "min")


def reductions(dtype):
    kind = DTYPES[dtype].kind
    return ("add", "mul", *ORDERED, *(BITS if kind in "biu" else ()))


def collectives(size):
    """Return collectives of all ops without their reductions."""
    found = []
    for groups in GROUPS[size]:
        uniform = len({len(group) for group in groups} or {size}) == 1
        found += [Collective("all_reduce", 0, groups), Collective("collective_broadcast", 0, groups)]
        moving = ("all_gather", "reduce_scatter", *(("all_to_all",) if uniform else ()))
        found += [Collective(op, 0, groups) for op in moving]
    found.append(Collective("collective_broadcast", 0, ((1, 2),)))
    return found + [Collective("collective_permute", 0, pairs=pairs) for pairs in PAIRS[size]]


SHAPE = (24, 12, 2)  # the first dim divides by 1, 2, 3, 4 and 8


def all_cases(size):
    """Return pairs of a collective with its serial number, and a dtype."""
    found = []
    for dtype in DTYPES:
        for c in collectives(size):
            reduced = c.op in ("all_reduce", "reduce_scatter")
            for reduction in reductions(dtype) if reduced else ("",):
                found.append((Collective(c.op, len(found), c.groups, c.pairs, reduction, "model.py:7"), dtype))
    return found


def operand(case, rank, shape=SHAPE):
    """Return an operand of a rank: random values of the dtype, with specials among floats."""
    c, dtype = case
    random = np.random.default_rng([c.serial, rank])
    kind, numpy_dtype = DTYPES[dtype].kind, to_numpy(dtype)
    if kind == "b":
        return random.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        info = DTYPES[dtype].bits
        low, high = (-(1 << (info - 1)), 1 << (info - 1)) if kind == "i" else (0, 1 << info)
        return random.integers(low, high, shape, np.int64 if kind == "i" else np.uint64).astype(numpy_dtype)
    values = random.standard_normal(shape).astype(np.float32)
    if kind == "c":
        return (values + 1j * random.standard_normal(shape)).astype(numpy_dtype)
    if np.prod(shape) > 8:
        values.reshape(-1)[[1, 3 + rank]] = np.nan, np.inf
    with np.errstate(all="ignore"):
        return values.astype(numpy_dtype)


def group_of(c, size, rank):
    groups = c.groups or (tuple(range(size)),)
    return next((group for group in groups if rank in group), None)


def result_shape(c, size, rank, shape):
    group = group_of(c, size, rank) if c.op != "collective_permute" else ()
    dims = list(shape)
    n = len(group or ())
    if c.op == "all_gather":
        dims[0] *= n
    elif c.op == "reduce_scatter":
        dims[0] //= n
    return tuple(dims)


def run_one(link, case, shape=SHAPE):
    """Run a case on one rank and return its result."""
    c, dtype = case
    result = np.full(result_shape(c, link.size, link.rank, shape), 1, to_numpy(dtype))
    x = operand(case, link.rank, shape)
    x.flags.writeable = False
    run_collective(c, link, [x], [result])
    return result


def run_threads(links, work):
    """Run ``work(link)`` for each rank on a thread; return results or exceptions.

    After an exception the links are closed.
    """
    results = [None] * len(links)

    def run(rank):
        try:
            results[rank] = work(links[rank])
        except Exception as error:
            results[rank] = error
            links[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# What the specification says, of the operands of all ranks.


def _reduced(values, reduction):
    """Reduce in order; small floats in f32 and rounded once, integers modulo their bits."""
    dtype = values[0].dtype
    name = dtype.name
    if "float" in name and name not in ("float32", "float64"):
        wide = [v.astype(np.float32) for v in values]
    elif name in ("int2", "int4", "uint2", "uint4"):
        wide = [v.astype(np.int64) for v in values]
    else:
        wide = values
    total = wide[0]
    with np.errstate(all="ignore"):
        for v in wide[1:]:
            match reduction:
                case "add":
                    total = total + v
                case "mul":
                    total = total * v
                case "max":
                    total = np.maximum(total, v)
                case "min":
                    total = np.minimum(total, v)
                case "and":
                    total = total & v
                case "or":
                    total = total | v
        return _wrapped(total, name).astype(dtype)


def _wrapped(total, name):
    if not name.endswith(("int2", "int4")):
        return total
    bits = int(name[-1])
    total = total % (1 << bits)
    return total if name.startswith("u") else np.where(total >= 1 << (bits - 1), total - (1 << bits), total)


def expected(case, size, rank, shape=SHAPE):
    """Return the result of a rank by the specification."""
    c, _ = case
    if c.op == "collective_permute":
        sources = [s for s, t in c.pairs if t == rank]
        return operand(case, sources[0], shape) if sources else np.zeros_like(operand(case, rank, shape))
    group = group_of(c, size, rank)
    if group is None:
        return np.zeros_like(operand(case, rank, shape))
    operands = [operand(case, r, shape) for r in group]
    me = group.index(rank)
    match c.op:
        case "collective_broadcast":
            return operands[0]
        case "all_reduce":
            return _reduced(operands, c.reduction)
        case "reduce_scatter":
            return np.split(_reduced(operands, c.reduction), len(group))[me]
        case "all_gather":
            return np.concatenate(operands)
        case "all_to_all":
            return np.concatenate([np.split(x, len(group))[me] for x in operands])


DIGESTED = ("i1", "i4", "u16", "f8E4M3FN", "bf16", "f32", "c128")  # to a transport a dtype is its size


def digest(link, cases):
    """Return the digest of all results of a rank, with sizes of all_reduce around its limits."""
    total = hashlib.sha256()
    for case in cases:
        if case[1] not in DIGESTED:
            continue
        total.update(run_one(link, case).tobytes())
    for n in (0, 1, 5, 4097, 40_001, 300_007):
        case = Collective("all_reduce", n, reduction="add"), "f32"
        total.update(run_one(link, case, (n,)).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    rank, size, address = (*sys.argv[1:], "")[:3] if len(sys.argv) > 2 else ("", "", "")
    ranks = Ranks(int(rank), int(size), address, "tcp") if address else ranks_from_environment()
    link = open_link(ranks, {"bundle": "x"})
    print(json.dumps([link.rank, digest(link, all_cases(link.size))]), flush=True)
    link.close()
