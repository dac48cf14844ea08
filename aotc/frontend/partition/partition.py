"""Partition a program for several devices into the program of one rank, which is the same for all ranks.

XLA's own partitioner, which JAX uses too, runs in a child process: a process cannot change its number of devices,
and an invalid program may end the process. Large programs take about a second.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.entry_attrs import attribute_dictionaries
from aotc.frontend.hidden_ops import operations_of
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.mlir_types import discardable_integer, is_private, module_bytes
from aotc.frontend.partition.hoist import HoistedConstant, hoist_constants, restore_constants
from aotc.frontend.partition.partitioner import ask_partitioner
from aotc.frontend.partition.self_test import check_partitioner
from aotc.frontend.partition.tilings import layout_of_tiling, mesh_of_factors
from aotc.vmfb.ranks.layout import Layout, Mesh, parts_of_dims

_COUNT, _REPLICAS = "mhlo.num_partitions", "mhlo.num_replicas"
_SHARDY = "sdy.sharding"
_SHARDINGS = (_SHARDY, "mhlo.sharding", "mhlo.layout_mode", "mhlo.memory_kind")
_AXIS = re.compile(r'"((?:[^"\\]|\\.)*)"=(\d+)')
_WHOLE_AXES = "in_shardings and out_shardings of whole axes"
_DEVICES = re.compile(r"device_ids=\[([\d, ]*)\]")

Axes = Sequence[tuple[str, int]]


def partitioned(module: ir.Module, path: str = "", axes: Axes = ()) -> tuple[bytes, dict[str, Any]]:
    """Partition a module; return the program of one rank as bytecode, and the layouts of its arguments and results.

    Parameters
    ----------
    module : ir.Module
        A StableHLO module for several devices, with shardings of Shardy or of MHLO, or manual computations. The
        function may modify it.
    path : str
        The model's file, for messages.
    axes : sequence of (str, int), optional
        Axes that replace those of the program's mesh.

    Returns
    -------
    bytes, dict
        The module, whose public function preserves names and donation; and ``mesh``, ``arguments``, ``results``: plain
        data as in :mod:`aotc.vmfb.ranks.layout`. XLA chooses the sharding of an argument or result without one, as in
        JAX.

    Raises
    ------
    CompileError
        If XLA refuses or cannot partition the program, or if ``axes`` do not fit it.
    """
    with module.context, ir.Location.unknown(module.context):
        main = _public_function(module, path)
        _check_partitionable(module, main, path)
        stated = _mesh_of(module)
        mesh = _mesh_with_axes(stated, axes, bool(_named_meshes(module)), path) if axes else stated
        _set_partitions(module, mesh.size)
        check_partitioner(path)
        whole = partial(_whole_array_sharding, mesh=stated, shardy=_uses_shardy(module))
        hoisted = hoist_constants(module, main, whole)
        layouts, local = _run_xla_partitioner(module, main, mesh, path)
        if _make_uneven_whole(main, stated, layouts):
            layouts, local = _run_xla_partitioner(module, main, mesh, path)
        for kind, row in zip(("argument", "result"), layouts, strict=True):
            for number, layout in enumerate(row):
                if layout is None:
                    message = f"{kind} {number} is not cut evenly by whole axes of the mesh {mesh}"
                    hint = "a mesh with other sizes or another order of axes" if axes else _WHOLE_AXES
                    raise CompileError.at(Loc(path), message, hint=hint)
        data = _finished_rank_program(module, main, local, hoisted)
    arguments, results = (tuple(row) for row in layouts)
    arguments = arguments[: len(arguments) - len(hoisted)]
    return data, {"mesh": mesh.entry(), "arguments": arguments, "results": results}


def _public_function(module: ir.Module, path: str) -> ir.OpView:
    """Return the only public function; raise CompileError if there is not exactly one."""
    functions = [op for op in module.body.operations if op.operation.name == "func.func"]
    public = [f for f in functions if not is_private(f)]
    if len(public) != 1:
        message = f"a program for several devices has one public function; found {len(public)}"
        raise CompileError.at(Loc(path), message, hint="compile each function by itself")
    return public[0]


def _check_partitionable(module: ir.Module, main: ir.OpView, path: str) -> None:
    """Reject replicas, and arguments or values of unknown size: XLA's partitioner needs known sizes."""
    attributes = module.operation.attributes
    if (replicas := discardable_integer(attributes, _REPLICAS, 1, Loc(path))) > 1:
        message = f"the program is for {replicas} replicas of its devices"
        raise CompileError.at(Loc(path), message, hint="a mesh axis in place of replicas: jax.shard_map or jax.jit")
    block = main.operation.regions[0].blocks[0]
    unnamed = []
    for number, argument in enumerate(block.arguments):
        kind = argument.type
        if not isinstance(kind, ir.RankedTensorType):
            raise CompileError.at(Loc(path), f"argument {number} of a program for several devices is a {kind}")
        if not kind.has_static_shape:
            unnamed.append(f"argument {number} is {kind}")
    if unnamed:
        message = f"the program is for several devices, and has sizes without names: {', '.join(unnamed)}"
        hint = "a number for each ?, or jax.export of the function, which names sizes, with specialize={'b': (8, 16)}"
        raise CompileError.at(loc_from_mlir(main.operation.location, path), message, hint=hint)
    for op in block.operations:
        for value in op.operation.results:
            if isinstance(value.type, ir.RankedTensorType) and not value.type.has_static_shape:
                message = f"{op.operation.name} gives {value.type}: a program for several devices has known sizes"
                raise CompileError.at(loc_from_mlir(op.operation.location, path), message, hint="sizes as numbers")


def names_several_devices(module: ir.Module, devices: int) -> bool:
    """Return True if a program is for several devices, and store their number in the module.

    JAX states one device for a function over a mesh without devices if none of its arguments has a sharding. So the
    mesh decides for programs for which JAX has stated ``devices`` (0: not stated), and for manual computations.
    """
    if devices > _partition_count(module):
        _set_partitions(module, devices)
    if _partition_count(module) > 1:
        return True
    counts = devices > 0 or any(op.name == "sdy.manual_computation" for op in operations_of(module))
    return counts and any(mesh.size > 1 for mesh in _named_meshes(module))


def _partition_count(module: ir.Module) -> int:
    return discardable_integer(module.operation.attributes, _COUNT, 1, Loc())


def _set_partitions(module: ir.Module, count: int) -> None:
    with module.context:
        module.operation.attributes[_COUNT] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), count)


def _named_meshes(module: ir.Module) -> list[Mesh]:
    """Return the meshes that a program defines."""
    meshes = []
    for op in module.body.operations:
        if op.operation.name == "sdy.mesh":
            text = str(op.operation.attributes["mesh"])
            devices = _DEVICES.search(text)
            order = tuple(int(n) for n in devices[1].split(",")) if devices else ()
            meshes.append(Mesh(tuple((name, int(size)) for name, size in _AXIS.findall(text)), order))
    return meshes


def _mesh_of(module: ir.Module) -> Mesh:
    """Return the mesh that a program defines, or else a mesh of the prime factors of its number of devices."""
    meshes = [mesh for mesh in _named_meshes(module) if mesh.axes]
    count = _partition_count(module)
    count = count if count > 1 else max((mesh.size for mesh in meshes), default=1)
    return next((mesh for mesh in meshes if mesh.size == count), mesh_of_factors(count))


def _mesh_with_axes(stated: Mesh, axes: Axes, is_named: bool, path: str) -> Mesh:
    """Return the program's mesh with other axes: other names, or axes that are cut into several.

    Raises
    ------
    CompileError
        If the axes have another number of devices, do not divide the axes that the program names, or have the
        program's names in another order.
    """
    proposed = Mesh(tuple(axes), stated.devices)
    program_mesh = f"{stated.size} devices{f' ({stated})' if is_named else ''}"
    if proposed.size != stated.size:
        message = f"the mesh {proposed} has the size {proposed.size}, and the program is for {program_mesh}"
        example = _mesh_as_option(stated) if is_named else f"data={stated.size}"
        hint = f"axes with the product {stated.size}, such as {example}"
        raise CompileError.at(Loc(path), message, hint=hint)
    if not is_named:
        return proposed
    names, stated_names = ([name for name, _ in mesh.axes] for mesh in (proposed, stated))
    is_swapped = names != stated_names and sorted(names) == sorted(stated_names)
    if is_swapped or not {*_sizes_from_last(stated)} <= {*_sizes_from_last(proposed)}:
        message = f"the mesh {proposed} does not fit the program, which is for {program_mesh}"
        hint = f"these sizes in this order, with any names: {_mesh_as_option(stated)}; an axis may be several"
        raise CompileError.at(Loc(path), message, hint=hint)
    return proposed


def _sizes_from_last(mesh: Mesh) -> list[int]:
    """Return the number of devices of the last axis, of the last two, and so on."""
    return list(accumulate((size for _, size in reversed(mesh.axes)), mul))


def _mesh_as_option(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.axes)


def _argument_and_result_types(main: ir.OpView) -> tuple[tuple[str, Sequence[Any]], tuple[str, Sequence[Any]]]:
    """Return the types of arguments and of results, each with the name of the attribute that describes them."""
    kind = main.operation.attributes["function_type"].value
    return ("arg_attrs", kind.inputs), ("res_attrs", kind.results)


def _run_xla_partitioner(
    module: ir.Module, main: ir.OpView, mesh: Mesh, path: str
) -> tuple[list[list[Layout | None]], bytes]:
    """Run XLA's partitioner; return the layouts of arguments and of results, and the program of a rank.

    A layout is None if XLA does not cut the array evenly by whole mesh axes. XLA may choose the cuts of arguments and
    results without a sharding.
    """
    ends = _argument_and_result_types(main)
    attributes = [attribute_dictionaries(main, kind, len(types)) for kind, types in ends]
    is_open = [[not {*row} & {*_SHARDINGS[:2]} for row in rows] for rows in attributes]
    request = {
        "devices": mesh.size, "open_arguments": is_open[0], "open_results": is_open[1], "shardy": _uses_shardy(module)
    }
    reply, local = ask_partitioner(request, module_bytes(module), path)
    if reply["error"]:
        raise CompileError.at(Loc(path), f"XLA cannot partition the program: {_first_line(reply['error'])}")
    layouts = []
    for (_, types), tilings in zip(ends, (reply["arguments"], reply["results"]), strict=True):
        cuts = [layout_of_tiling(mesh, t, x.rank) for t, x in zip(tilings or [{}] * len(types), types, strict=True)]
        even = [x is not None and _is_evenly_cut(mesh, x, t) for x, t in zip(cuts, types, strict=True)]
        layouts.append([x if fits else None for x, fits in zip(cuts, even, strict=True)])
    return layouts, local


def _is_evenly_cut(mesh: Mesh, layout: Layout, kind: ir.RankedTensorType) -> bool:
    return all(size % parts == 0 for size, parts in zip(kind.shape, parts_of_dims(mesh, layout), strict=True))


def _make_uneven_whole(main: ir.OpView, mesh: Mesh, layouts: Sequence[Sequence[Layout | None]]) -> bool:
    """Replicate arguments and results that XLA would cut unevenly; return True if there are any."""
    changed = False
    for (kind, types), row in zip(_argument_and_result_types(main), layouts, strict=True):
        rows = attribute_dictionaries(main, kind, len(types))
        for number, (type_, layout) in enumerate(zip(types, row, strict=True)):
            if layout is None and not {*rows[number]} & {*_SHARDINGS[:2]}:
                rows[number] = {**rows[number], **_whole_array_sharding(type_, mesh)}
                changed = True
        main.operation.attributes[kind] = ir.ArrayAttr.get([ir.DictAttr.get(attributes) for attributes in rows])
    return changed


def _uses_shardy(module: ir.Module) -> bool:
    return any(op.operation.name == "sdy.mesh" for op in module.body.operations)


def _whole_array_sharding(type_: ir.RankedTensorType, mesh: Mesh, shardy: bool = True) -> dict[str, ir.Attribute]:
    """Return the attributes, of Shardy or of MHLO, that replicate an array on each device."""
    if not shardy:
        return {_SHARDINGS[1]: ir.StringAttr.get("{replicated}")}
    dims = ", ".join(["{}"] * type_.rank)
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh.axes)
    return {
        _SHARDY: ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]>, [{dims}]>"),
    }


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), text)


def _finished_rank_program(
    module: ir.Module, main: ir.OpView, local: bytes, hoisted: list[HoistedConstant]
) -> bytes:
    """Add the argument names, donation and hoisted constants of the whole program to the program of a rank."""
    rank = ir.Module.parse(local)
    target = _public_function(rank, "").operation
    source = main.operation
    for kind in ("arg_attrs", "res_attrs"):
        if kind in source.attributes:
            rows = [{a.name: a.attr for a in row if a.name not in _SHARDINGS} for row in source.attributes[kind]]
            target.attributes[kind] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows])
        elif kind in target.attributes:
            del target.attributes[kind]
    own, whole_arguments = (op.regions[0].blocks[0].arguments for op in (target, source))
    for argument, named in zip(own, whole_arguments, strict=True):
        argument.set_location(named.location)  # XLA's are called "param"
    restore_constants(target, hoisted)
    target.attributes["sym_name"] = source.attributes["sym_name"]
    for name in [name for name, _ in rank.operation.attributes.items() if name.startswith("mhlo.")]:
        del rank.operation.attributes[name]
    rank.operation.attributes["sym_name"] = module.operation.attributes.get("sym_name", ir.StringAttr.get("main"))
    rank.operation.attributes[_COUNT] = module.operation.attributes[_COUNT]
    return module_bytes(rank)
