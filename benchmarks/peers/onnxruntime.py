"""ONNX Runtime: a model as ONNX by jax2onnx, with its weights as constants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.children import environment, module_command_line
from benchmarks.peers.adapter import Loaded

MODULE, INSTALL = "onnxruntime", "onnxruntime jax2onnx"


def prepare(name: str, folder: Path, precision: str) -> dict[str, float]:
    """Convert the model in its own process, unless its ONNX file exists."""
    if not (folder / "model.onnx").exists():
        words = module_command_line("benchmarks.peers.onnxruntime", name, folder)
        subprocess.run(words, check=True, capture_output=True, text=True, env=environment())
    return {}


def load(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, precision: str) -> Loaded:
    """Return a call of an ONNX Runtime session."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    feed = {i.name: x for i, x in zip(session.get_inputs(), inputs)}
    return lambda: session.run(None, feed), None


def convert(name: str, folder: Path) -> None:
    """Write a model of ``models.py`` as ONNX, with its weights as constants."""
    import jax
    import onnx
    from jax2onnx import to_onnx

    from benchmarks.programs.models import MODELS

    model = MODELS[name]()
    leaves, tree = jax.tree.flatten(model.inputs)
    function = lambda *x: tuple(jax.tree.leaves(model.function(*jax.tree.unflatten(tree, x))))
    made = to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])
    _join_types(made.graph)
    _pool_images(made.graph)
    onnx.save(made, folder / "model.onnx")


def _join_types(graph: Any) -> None:
    """Convert operands of an Einsum to the type of the first: jax2onnx leaves a mask as integers."""
    import onnx

    known = {v.name: v.type.tensor_type.elem_type for v in (*graph.value_info, *graph.input)}
    known |= {i.name: i.data_type for i in graph.initializer}
    for at, node in reversed(list(enumerate(graph.node))):
        for k, name in enumerate(node.input if node.op_type == "Einsum" else ()):
            wanted = known.get(node.input[0])
            if wanted and known.get(name, wanted) != wanted:
                node.input[k] = f"{node.name}_{name}"
                graph.node.insert(at, onnx.helper.make_node("Cast", [name], [node.input[k]], to=wanted))


def _pool_images(graph: Any) -> None:
    """Rewrite pooling over four dims, as jax2onnx writes it, as pooling over two, which engines support.

    The windows are ``[1, 1, 1, h, w, c]``.
    """

    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info}
    for at, node in reversed(list(enumerate(graph.node))):
        sizes = {a.name: list(a.ints) for a in node.attribute}
        kernel = sizes.get("kernel_shape", ())
        if node.op_type != "MaxPool" or len(kernel) != 4 or set(sizes) != {"kernel_shape", "strides"}:
            continue
        del graph.node[at]
        for step in reversed(_pooling(graph, node, shapes, {name: sizes[name][1:3] for name in sizes})):
            graph.node.insert(at, step)


def _pooling(graph: Any, node: Any, shapes: dict[str, list[int]], sizes: dict[str, list[int]]) -> list[Any]:
    import onnx

    (x,), (y,) = node.input, node.output
    for name, shape in ((f"{y}_in", shapes[x][2:]), (f"{y}_out", shapes[y])):
        graph.initializer.append(onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [len(shape)], shape))
    return [
        onnx.helper.make_node("Reshape", [x, f"{y}_in"], [f"{y}_image"]),
        onnx.helper.make_node("Transpose", [f"{y}_image"], [f"{y}_planes"], perm=[0, 3, 1, 2]),
        onnx.helper.make_node("MaxPool", [f"{y}_planes"], [f"{y}_pooled"], **sizes),
        onnx.helper.make_node("Transpose", [f"{y}_pooled"], [f"{y}_turned"], perm=[0, 2, 3, 1]),
        onnx.helper.make_node("Reshape", [f"{y}_turned", f"{y}_out"], [y]),
    ]


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
