"""Rewrite a model for several devices as a program for one device, a reference for the results of its ranks."""

from __future__ import annotations

from dataclasses import replace

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.mlir import RawModel, make_context, parse_model, upgrade_module
from aotc.frontend.mlir_types import inner_operations, module_bytes

_COUNT = "mhlo.num_partitions"
_SAME = ("sdy.sharding_constraint", "sdy.reshard", "sdy.propagation_barrier")  # the value, with a sharding
_SAME_CALL = "Sharding"
_MANUAL = "sdy.manual_computation"
_MANUAL_CALLS = ("SPMDFullToShardShape", "SPMDShardToFullShape")


def for_one_device(raw: RawModel) -> RawModel:
    """Return a model for several devices as a model for one device, without shardings.

    Raises
    ------
    CompileError
        If the program describes what one rank computes, as that of ``jax.shard_map`` does.
    """
    with make_context():
        module = parse_model(raw.code)
        upgrade_module(module)
        _remove_shardings(module, raw.path)
        written = module_bytes(module)
    metadata = {key: value for key, value in raw.metadata.items() if key not in ("devices", "ranks")}
    return replace(raw, data=written, metadata=metadata, rewritten=b"")


def _remove_shardings(module: ir.Module, path: str) -> None:
    """Remove meshes, sharding ops and sharding attributes from a module."""
    module.operation.attributes[_COUNT] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
    stack = [module.operation]
    while stack:
        op = stack.pop()
        stack += inner_operations(op)
        name = _called_name(op) or op.name
        if name == _MANUAL or name in _MANUAL_CALLS:
            what = "jax.shard_map describes what one rank computes: no program for one device is known to compare with"
            hint = "compare aotc.gang(...) with the function itself in jax"
            raise CompileError.at(loc_from_mlir(op.location, path), what, hint=hint)
        if op.name == "sdy.mesh":
            op.erase()
        elif op.name in _SAME or name == _SAME_CALL:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        else:
            _remove_attributes(op)


def _called_name(op: ir.Operation) -> str:
    """Return the target of a custom call, or an empty string for other ops."""
    return str(op.attributes["call_target_name"].value) if op.name == "stablehlo.custom_call" else ""


def _remove_attributes(op: ir.Operation) -> None:
    """Remove sharding attributes from an op and from its arguments and results."""
    for name in [name for name, _ in op.attributes.items() if _is_sharding_attribute(name)]:
        del op.attributes[name]
    for kind in ("arg_attrs", "res_attrs"):
        if kind in op.attributes:
            rows = [{a.name: a.attr for a in row if not _is_sharding_attribute(a.name)} for row in op.attributes[kind]]
            op.attributes[kind] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows])


def _is_sharding_attribute(name: str) -> bool:
    return name.startswith("sdy.") or name == "mhlo.sharding"
