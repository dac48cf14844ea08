"""Self-test of XLA's partitioner in a version of jaxlib that aotc was not tested with.

aotc reads the partitioned program from a dump of XLA, whose form may change. Known is a silent error: without a flag,
groups of devices lose the order of devices of their mesh. So the first partition with another jaxlib partitions a small
program first, whose parts have another order than the devices. Its result is compared with the groups that follow from
the mesh. A passed test is stored in the cache folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from typing import Any

import jaxlib
from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.contexts import make_context
from aotc.frontend.hidden_ops import operations_of
from aotc.frontend.mlir_types import module_bytes
from aotc.frontend.partition.partitioner import ask_partitioner
from aotc.kernels.jobs.store import read_cache_entry, write_cache_entry

TESTED = frozenset({"0.10.2"})
"""Versions of jaxlib with which the tests of sharded models pass."""

_FOLDER = "partitioners"
# Rows are cut by the second axis of the mesh and columns by the first, so parts have another order than devices. Ranks
# of the same "b" are 4 apart. A sum of columns exchanges data between them, and so does the copy of whole rows.
_PROGRAM = """
module @self_test attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["a"=2, "b"=4]>
  func.func public @main(%x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {"a"}]>})
      -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}]>},
          tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"b"}, {}]>}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [1]
        : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
    %sine = stablehlo.sine %x : tensor<8x8xf32>
    return %sum, %sine : tensor<8xf32>, tensor<8x8xf32>
  }
}
"""
_GROUPS = {(0, 4), (1, 5), (2, 6), (3, 7)}
_DEVICES = [0, 4, 1, 5, 2, 6, 3, 7]
_EXPECTED = {"stablehlo.all_gather": "tensor<2x8xf32>", "stablehlo.all_reduce": "tensor<2xf32>"}
_ELEMENTS = re.compile(r"dense<(\[\[.*?\]\])>")


def check_partitioner(path: str) -> None:
    """Refuse a jaxlib whose partitioner fails the self-test.

    Raises
    ------
    CompileError
        If jaxlib has another version than the tested ones, and its partitioner gives another program than expected.
    """
    version = jaxlib.__version__
    if version in TESTED:
        return
    if fault := _fault_of_version(version):
        known = " or ".join(sorted(TESTED))
        message = f"XLA's partitioner in jaxlib {version} fails a small test, so its programs may be wrong: {fault}"
        raise CompileError.at(Loc(path), message, hint=f"jaxlib {known}, with which aotc is tested")


@cache
def _fault_of_version(version: str) -> str:
    """Return the partitioner's fault as text, empty if it has none; tested once per process and version."""
    key = sha256(f"{version}\0{_PROGRAM}".encode()).hexdigest()
    if read_cache_entry(_FOLDER, key) is not None:
        return ""
    fault = run_self_test()
    if not fault:
        write_cache_entry(_FOLDER, key, version.encode())
    return fault


def run_self_test() -> str:
    """Partition the small program; return the difference from what is expected, or an empty string."""
    with make_context(), ir.Location.unknown():
        code = module_bytes(ir.Module.parse(_PROGRAM))
        request = {"devices": 8, "open_arguments": [False], "open_results": [False, False], "shardy": True}
        try:
            reply, local = ask_partitioner(request, code, "")
        except CompileError as error:
            return error.findings[0].message
        return reply["error"] or _fault_of_layouts(reply) or _fault_of_program(local)


def _fault_of_layouts(reply: Mapping[str, Any]) -> str:
    found = [*reply["arguments"], *reply["results"]]
    expected = [{"parts": parts, "devices": _DEVICES} for parts in ([4, 2], [4], [4, 1])]
    return "" if found == expected else f"the layouts are {found}, expected {expected}"


def _fault_of_program(local: bytes) -> str:
    """Return the fault of the collectives, empty if each kind occurs once with the type and groups of the mesh."""
    try:
        module = ir.Module.parse(local)
    except ir.MLIRError as error:
        return f"the program cannot be read: {str(error).splitlines()[0]}"
    found = {}
    for op in operations_of(module):
        if "replica_groups" in op.attributes:
            groups = _groups_of(op.attributes["replica_groups"])
            if groups != _GROUPS:
                return f"{op.name} has the groups {op.attributes['replica_groups']}"
            found[op.name] = str(op.results[0].type)
    return "" if found == _EXPECTED else f"the collectives are {found}, expected {_EXPECTED}"


def _groups_of(attribute: ir.Attribute) -> set[tuple[int, ...]]:
    """Return the groups of a collective, sorted; empty if they are not numbers of devices."""
    elements = _ELEMENTS.search(str(attribute))
    if elements is None:
        return set()
    rows = re.findall(r"\[([\d, ]+)\]", elements[1])
    return {tuple(sorted(int(n) for n in row.split(","))) for row in rows}
