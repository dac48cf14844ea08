"""Partition a program by the passes of Shardy that jaxlib has, without XLA: a second opinion on aotc's own way.

As a program it reads StableHLO from standard input, and writes the program of a rank and its layouts as JSON. It is run
as a child, since some of Shardy's checks end the process.
"""

import json
import subprocess
import sys

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext
from jaxlib.mlir.dialects import sdy

from aotc.frontend.contexts import make_context

FUNCTION = "builtin.module(func.func({}))"
MODULE = "builtin.module({})"
BEFORE = (
    MODULE.format("symbol-dce"), MODULE.format("sdy-propagation-pipeline"),
    MODULE.format("sdy-update-non-divisible-input-output-shardings"),
    MODULE.format("sdy-remove-sub-axes-in-input-output-shardings"), MODULE.format("sdy-close-shardings"),
)  # fmt: skip
AFTER = (
    FUNCTION.format("sdy-insert-explicit-reshards{enable-full-version=true}"),
    FUNCTION.format("sdy-reshard-to-collectives"), FUNCTION.format("sdy-pad-for-divisibility"),
    MODULE.format("sdy-convert-global-to-local"), MODULE.format("sdy-export-named-computations"),
)  # fmt: skip


def partitioned(text):
    """Return the program of a rank, and ``mesh``, ``arguments``, ``results`` as in a model's metadata.

    Raises
    ------
    RuntimeError
        If Shardy refuses the program, or ends the process.
    """
    done = subprocess.run([sys.executable, __file__], input=text, text=True, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    found = json.loads(done.stdout)
    return found["text"], found["ranks"]


def inline_calls(module):
    """Inline all calls: MLIR's own pass does nothing, as jaxlib registers no inliner of functions."""
    functions = {o.operation.attributes["sym_name"].value: o.operation for o in module.body.operations if is_func(o)}
    ready = set()

    def visit(block):
        for op in list(block.operations):
            for region in op.operation.regions:
                for inner in region.blocks:
                    visit(inner)
            if op.operation.name == "func.call":
                callee = functions[ir.FlatSymbolRefAttr(op.operation.attributes["callee"]).value]
                prepare(callee)
                with ir.InsertionPoint(op.operation):
                    results = _jax_mlir_ext.inlined_func_call(callee, list(op.operation.operands))
                for old, new in zip(op.operation.results, results, strict=True):
                    old.replace_all_uses_with(new)
                op.operation.erase()

    def prepare(function):
        name = function.attributes["sym_name"].value
        if name not in ready:
            ready.add(name)
            for block in function.regions[0].blocks:
                visit(block)

    for function in functions.values():
        prepare(function)


def is_func(op):
    return op.operation.name == "func.func"


def layouts(types, rows):
    """Return the axes of each dim of values."""
    found = []
    for n, kind in enumerate(types):
        axes = [[] for _ in ir.RankedTensorType(kind).shape]
        row = ir.DictAttr(rows[n]) if rows is not None else {}
        if "sdy.sharding" in row:
            dims = sdy.TensorShardingAttr(row["sdy.sharding"]).dimension_shardings
            refs = [[sdy.AxisRefAttr(axis) for axis in sdy.DimensionShardingAttr(dim).axes] for dim in dims]
            assert not any(ref.sub_axis_info for dim in refs for ref in dim)
            axes = [[ref.name for ref in dim] for dim in refs]
        found.append(axes)
    return found


def main():
    """Partition the program of standard input."""
    with make_context() as context, ir.Location.unknown(context):
        module = ir.Module.parse(sys.stdin.read())
        inline_calls(module)
        for names in BEFORE:
            passmanager.PassManager.parse(names).run(module.operation)
        (mesh,) = (op.operation for op in module.body.operations if op.operation.name == "sdy.mesh")
        axes = [[axis.name, axis.size] for axis in map(sdy.MeshAxisAttr, sdy.MeshAttr(mesh.attributes["mesh"]).axes)]
        (function,) = (op.operation for op in module.body.operations if is_func(op))
        kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
        rows = [function.attributes.get(key, None) for key in ("arg_attrs", "res_attrs")]
        cuts = [layouts(types, row) for types, row in zip((kind.inputs, kind.results), rows, strict=True)]
        ranks = {"mesh": {"axes": axes}, "arguments": cuts[0], "results": cuts[1]}
        for names in AFTER:
            passmanager.PassManager.parse(names).run(module.operation)
        inline_calls(module)
        for names in ("symbol-dce", "sdy-drop-sharding-and-mesh", "cse"):
            passmanager.PassManager.parse(MODULE.format(names)).run(module.operation)
        print(json.dumps({"text": str(module), "ranks": ranks}))


if __name__ == "__main__":
    main()
