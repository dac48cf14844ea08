"""Ops for control flow and effects (while, case, call, assert, custom calls), and for placement on devices."""

from __future__ import annotations

import numpy as np

from aotc.ir.opset.spec import Arrays, Attrs, OpSpec, RegionCall, Types, op_spec_table, require_rule
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.messages import render_message


class AssertionFailed(ValueError):
    """The condition of an ``assert`` op is false; the text is its message."""


def _infer_while(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    for region, what in zip(regions, ("condition", "body")):
        found = tuple(p.type for p in region.params)
        require_rule(
            found == types, f"while: {what} takes {_type_list(found)}, the carried values are {_type_list(types)}"
        )
    if regions:
        test = tuple(r.type for r in regions[0].results)
        require_rule(
            len(test) == 1 and test[0].dtype == "i1" and test[0].rank == 0,
            f"while: the condition gives {_type_list(test)}",
        )
        back = tuple(r.type for r in regions[1].results)
        require_rule(
            back == types, f"while: the body gives {_type_list(back)}, the carried values are {_type_list(types)}"
        )
    return types


def _type_list(types: Types) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


def _reference_while(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    """Run a loop until its condition is False.

    Inside a combiner, such as the body of a ``reduce``, scalars are arrays: each element stops when its own condition
    is False.
    """
    condition, body = regions
    carried = list(arrays)
    while (going := np.asarray(condition(*carried)[0])).any():
        after = body(*carried)
        carried = after if going.ndim == 0 else [np.where(going, new, old) for new, old in zip(after, carried)]
    return carried


def _infer_case(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(
        len(types) == 1 and types[0].rank == 0 and types[0].dtype == "i32",
        f"case: the index is {_type_list(types)}, expected i32[]",
    )
    require_rule(bool(regions), "case: has no branch")
    found = tuple(r.type for r in regions[0].results)
    for region in regions:
        require_rule(not region.params, "case: a branch takes parameters")
        other = tuple(r.type for r in region.results)
        require_rule(other == found, f"case: branches give {_type_list(found)} and {_type_list(other)}")
    return found


def _reference_case(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    index = int(arrays[0])
    return regions[index if 0 <= index < len(regions) else -1]()


def _infer_declared(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return given


def _reference_refused(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    raise NotImplementedError(f"the reference has no meaning for {attrs.get('target') or attrs.get('callee')}")


def _infer_assert(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(
        bool(types) and types[0].dtype == "i1" and types[0].rank == 0,
        f"assert: the condition is {_type_list(types[:1])}",
    )
    for t in types[1:]:
        require_rule(
            t.rank == 0 and kind_of(t.dtype) in "iu", f"assert: a message argument is {t}, expected an integer scalar"
        )
    return ()


def _reference_assert(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    if not bool(arrays[0]):
        raise AssertionFailed(render_message(attrs["message"], [int(a) for a in arrays[1:]]))
    return []


def _infer_fail(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(
        len(types) == 1 and types[0].rank == 0 and kind_of(types[0].dtype) in "iu",
        f"fail: the number of the message is {_type_list(types)}, expected an integer scalar",
    )
    return given


def _reference_fail(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    last = len(attrs["messages"]) - 1
    raise AssertionFailed(attrs["messages"][min(max(int(arrays[0]), 0), last)])


def _infer_bind_dim(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(
        len(types) == 1 and types[0].rank == 0 and kind_of(types[0].dtype) in "iu",
        f"bind_dim: the size is {_type_list(types)}, expected an integer scalar",
    )
    return ()


def _reference_bind_dim(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    if int(arrays[0]) < 0:
        raise AssertionFailed(f"a size is negative: {int(arrays[0])}")
    return []


def _infer_on(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(not types, f"on: takes no operands, found {_type_list(types)}")
    require_rule(not (regions and regions[0].params), "on: its region takes parameters")
    return tuple(r.type for r in regions[0].results)


def _reference_on(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    return regions[0]()


def _infer_transfer(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(len(types) == 1, f"transfer: takes one value, found {_type_list(types)}")
    return types


def _reference_transfer(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.array(arrays[0])]


CONTROL = op_spec_table(
    OpSpec("bind_dim", _infer_bind_dim, _reference_bind_dim, ("dim",), effect=True),
    OpSpec("while", _infer_while, _reference_while, regions=2, branches=True, folds_state=True),
    OpSpec("case", _infer_case, _reference_case, regions=-1, branches=True),
    OpSpec(
        "on",
        _infer_on,
        _reference_on,
        ("device",),
        1,
        branches=True,
        added_by="isolate_devices",
        removed_by="join_devices",
    ),
    OpSpec("transfer", _infer_transfer, _reference_transfer, ("device",), tolerance=0),
    OpSpec("call", _infer_declared, _reference_refused, ("callee",), effect=True, of_format=True, removed_by="inline"),
    OpSpec("dispatch", _infer_declared, _reference_refused, ("callee",), of_format=True, added_by="fuse"),
    OpSpec("assert", _infer_assert, _reference_assert, ("message",), effect=True),
    OpSpec("fail", _infer_fail, _reference_fail, ("messages",), of_format=True, tolerance=0, removed_by="hoist_checks"),
    OpSpec("custom_call", _infer_declared, _reference_refused, ("target",), effect=True, of_format=True),
)

DEVICE_OPS = frozenset({"on", "transfer"})
"""Ops that place others on a device."""

VIEWS = frozenset({"reshape", "transfer"})
"""Ops that reshape their operand's memory, or pass it to a device that shares it."""

HOST = frozenset({"dispatch", "while", "case", "assert", "bind_dim", "constant", "reshape", "on", "transfer"})
"""Ops of a function whose other ops are in regions: the order of kernels, with the buffers and views that they read."""

RUNS_ONCE = "runs_once"
"""The attribute of a branch with the number of the side that runs about once in a run of the loop around it."""

REFUSED_ON_GPUS = "refused"
"""How a custom call is called on a GPU (its attribute ``gpu``) if the user's function does not fit, and why."""

JUDGED = frozenset({"assert", "bind_dim"})
"""Ops of the host program that read their operands from any device's memory, and wait for them."""
