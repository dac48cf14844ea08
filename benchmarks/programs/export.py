"""Export a model of ``models.py`` with its inputs and XLA's results to a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.programs.models import MODELS


def export(name: str, folder: Path) -> dict[str, Any]:
    """Write a model as a ``jax.export`` blob and as bytecode, with its inputs and results; return its tolerance."""
    model = MODELS[name]()
    specs = jax.export.symbolic_args_specs(model.inputs, model.specs or ("...",) * len(model.inputs))
    exported = jax.export.export(jax.jit(model.function), platforms=("cpu",))(*specs)
    (folder / "model.jaxexp").write_bytes(exported.serialize())
    (folder / "model.mlirbc").write_bytes(exported.mlir_module_serialized)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model.inputs)]
    np.savez(folder / "inputs.npz", *leaves)
    results = [np.asarray(r) for r in jax.tree.leaves(jax.jit(exported.call)(*model.inputs))]
    np.savez(folder / "results.npz", *[r.astype("float64") if r.dtype.kind not in "iub" else r for r in results])
    return {"tolerance": model.tolerance, "kept": list(exported.module_kept_var_idx)}


if __name__ == "__main__":
    facts = export(sys.argv[1], Path(sys.argv[2]))
    Path(sys.argv[2], "facts.json").write_text(json.dumps(facts))
