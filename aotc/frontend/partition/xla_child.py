"""Child process of :mod:`aotc.frontend.partition.partition`: XLA's partitioner on as many CPU devices as a mesh has.

XLA offers the partitioned program only as a dump of its pass ``spmd-partitioning``, the first of a compilation. So the
child begins to compile, waits for that file, and ends without waiting for the rest.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxlib import _hlo, _jax, xla_client

from aotc.source.reader_process import read_frame, write_frame

_PASS = "spmd-partitioning"
_DUMP = (("xla_dump_hlo_pass_re", _PASS), ("xla_dump_hlo_as_proto", True))
# Seconds between two looks at the folder in which the partitioned program appears.
POLL_SECONDS = 0.002


def serve() -> None:
    """Partition the program of one request and end the process."""
    output = os.dup(1)
    os.dup2(2, 1)  # XLA's messages
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return
    try:
        reply, code = _partition_by_xla(*frame)
    except Exception as error:  # of XLA; the parent reports it
        reply, code = {"error": f"{type(error).__name__}: {error}"}, b""
    write_frame(output, reply, code)
    os._exit(0)  # the compilation goes on in its thread


def _partition_by_xla(request: Mapping[str, Any], code: bytes) -> tuple[dict[str, Any], bytes]:
    """Partition a program; return the shardings of arguments and results, and a rank's StableHLO bytecode."""
    proto = _hlo_module_of(_dumped_hlo_file(request, code, Path(request["folder"])))
    module = _hlo.HloModule.from_serialized_hlo_module_proto(proto)
    results = module.spmd_output_sharding
    parts = xla_client.HloSharding.from_proto(results) if results is not None else None
    outputs = ([*parts.tuple_elements()] or [parts]) if parts is not None else []
    inputs = [xla_client.HloSharding.from_proto(s) for s in module.spmd_parameters_shardings]
    reply = {
        "error": "",
        "arguments": [_tiling_of_sharding(s) for s in inputs],
        "results": [_tiling_of_sharding(s) for s in outputs],
    }
    return reply, _jax.mlir.hlo_to_stablehlo(proto)


def _dumped_hlo_file(request: Mapping[str, Any], code: bytes, folder: Path) -> bytes:
    """Compile a program until XLA has dumped the partitioned module, and return that file: an HloProto."""
    count = request["devices"]
    client = xla_client.make_cpu_client(num_devices=count)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, count
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, count
    build.use_spmd_partitioning, build.use_shardy_partitioner = True, request["shardy"]
    build.allow_spmd_sharding_propagation_to_parameters = request["open_arguments"]
    build.allow_spmd_sharding_propagation_to_output = request["open_results"]
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(count, dtype=np.int32)[None])
    options.env_option_overrides = [("xla_dump_to", str(folder)), *_DUMP, *map(tuple, request["flags"])]
    devices = xla_client.DeviceList(tuple(client.devices()[:count]))
    errors: list[Exception] = []

    def compile_program() -> None:
        try:
            client.compile_and_load(code, devices, options)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=compile_program, daemon=True)
    thread.start()
    while True:
        # Tested before the folder is listed, so that a file written last is not missed.
        ended = not thread.is_alive()
        dumped = [p for p in folder.iterdir() if f"after_{_PASS}" in p.name and p.name.endswith(".hlo.pb")]
        if dumped:
            return _whole_file(dumped[0])
        if ended:
            raise errors[0] if errors else RuntimeError(f"XLA wrote no program after {_PASS}")
        time.sleep(POLL_SECONDS)


def _whole_file(path: Path) -> bytes:
    """Wait until a file that XLA is writing is a complete HloProto, and return its bytes."""
    while True:
        data = path.read_bytes()
        try:
            if data and _fields_end(data) == len(data):
                return data
        except IndexError:
            pass
        time.sleep(POLL_SECONDS)


def _fields_end(data: bytes) -> int:
    """Return the position after the last field of a serialized Protocol Buffers message.

    Raises
    ------
    IndexError
        If the message ends within a field.
    """
    at = 0
    while at < len(data):
        _, begin, size = _protobuf_field(data, at)
        at = begin + size
        if at > len(data):
            raise IndexError
    return at


def _hlo_module_of(data: bytes) -> bytes:
    """Return the HloModuleProto of an HloProto, which is its field 1."""
    at = 0
    while at < len(data):
        tag, begin, size = _protobuf_field(data, at)
        if tag == (1 << 3) | 2:
            return data[begin : begin + size]
        at = begin + size
    raise ValueError("the dump of XLA has no module")


def _protobuf_field(data: bytes, at: int) -> tuple[int, int, int]:
    """Return tag, first byte and number of bytes of the field at position ``at``."""
    tag, begin = _protobuf_varint(data, at)
    if tag & 7 == 2:
        size, begin = _protobuf_varint(data, begin)
        return tag, begin, size
    if tag & 7 == 0:
        return tag, begin, _protobuf_varint(data, begin)[1] - begin
    raise ValueError(f"a field of kind {tag & 7} in an HloProto")


def _protobuf_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at position ``at`` and the position after it."""
    number = shift = 0
    while True:
        number |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return number, at


def _tiling_of_sharding(sharding: xla_client.HloSharding) -> dict[str, Any]:
    """Return ``parts`` of each dim, and ``devices`` in the order of the parts; an empty dict for a whole array.

    An array with fewer parts than devices is replicated: the devices of a part follow each other.
    """
    if not sharding.is_tiled():
        if sharding.is_replicated() or sharding.is_maximal():
            return {}
        raise ValueError(f"arguments and results cannot be {sharding}")
    parts = list(sharding.tile_assignment_dimensions())
    if sharding.replicate_on_last_tile_dim():
        parts.pop()
    elif sharding.subgroup_types():
        raise ValueError(f"arguments and results cannot be {sharding}")
    return {"parts": parts, "devices": [int(i) for i in sharding.tile_assignment_devices()]}
