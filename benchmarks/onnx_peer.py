"""A model as ONNX for ``run.py``: ``python benchmarks/onnx_peer.py NAME FOLDER`` writes ``model.onnx`` by jax2onnx."""

from __future__ import annotations

import sys
from pathlib import Path


def convert(name: str, folder: Path) -> None:
    """Write a model of ``models.py`` as ONNX, its weights as constants."""
    import jax
    import onnx
    from jax2onnx import to_onnx
    from models import MODELS

    model = MODELS[name]()
    leaves, tree = jax.tree.flatten(model.inputs)
    function = lambda *x: tuple(jax.tree.leaves(model.function(*jax.tree.unflatten(tree, x))))
    onnx.save(to_onnx(function, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]), folder / "model.onnx")


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
