"""OpenVINO: from ``model.onnx`` if that exists, else from JAX's trace, through its own reader of jaxprs.

That reader does not support calls, so they are inlined first. Both precisions are set explicitly: the default of a CPU
with instructions for bf16 is bf16.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.children import environment, module_command_line
from benchmarks.peers.adapter import BF16_TOLERANCE, Loaded

MODULE, INSTALL = "openvino", "openvino"


CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")
BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def evaluate_with_inlined_calls(jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
    """Evaluate a jaxpr with its calls inlined."""
    from jax.extend.core import Literal

    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments)))
    read = lambda x: x.val if isinstance(x, Literal) else known[x]
    for eqn in jaxpr.eqns:
        values = [read(x) for x in eqn.invars]
        if eqn.primitive.name in CALLS:
            body = next(eqn.params[name] for name in BODIES if name in eqn.params)
            inner, own = (body.jaxpr, body.consts) if hasattr(body, "consts") else (body, ())
            results = evaluate_with_inlined_calls(inner, own, values)
        else:
            results = eqn.primitive.bind(*values, **eqn.params)
            results = results if eqn.primitive.multiple_results else [results]
        known.update(zip(eqn.outvars, results))
    return [read(x) for x in jaxpr.outvars]


def convert(name: str, folder: Path) -> None:
    """Write a model of ``models.py`` in OpenVINO's own format."""
    import jax
    import openvino

    from benchmarks.programs.models import MODELS

    onnx = folder / "model.onnx"
    if onnx.exists():
        source: Any = onnx
    else:
        model = MODELS[name]()
        leaves, tree = jax.tree.flatten(model.inputs)
        traced = jax.make_jaxpr(lambda *x: jax.tree.leaves(model.function(*jax.tree.unflatten(tree, x))))(*leaves)
        source = jax.make_jaxpr(lambda *x: evaluate_with_inlined_calls(traced.jaxpr, traced.consts, x))(*leaves)
    openvino.save_model(openvino.convert_model(source), folder / "openvino.xml", compress_to_fp16=False)


def prepare(name: str, folder: Path, precision: str) -> dict[str, float]:
    """Convert the model in its own process; return the seconds, and the bytes of its weights."""
    start = time.perf_counter()
    words = module_command_line("benchmarks.peers.openvino", name, folder)
    subprocess.run(words, check=True, capture_output=True, text=True, env=environment())
    return {"compile": time.perf_counter() - start, "bytes": (folder / "openvino.bin").stat().st_size}


def load(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, precision: str) -> Loaded:
    """Return a call of the converted model in ``f32`` or ``bf16``."""
    import openvino

    if precision == "bf16":
        facts["tolerance"] = max(facts["tolerance"], BF16_TOLERANCE)
    core = openvino.Core()
    if precision.upper() not in (*core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"), "F32"):
        raise RuntimeError(f"error: this CPU has no instructions for {precision}")
    properties = {
        "INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY", "EXECUTION_MODE_HINT": "PERFORMANCE",
    }  # fmt: skip
    compiled = core.compile_model(core.read_model(folder / "openvino.xml"), "CPU", properties)
    request = compiled.create_infer_request()
    return lambda: list(request.infer(inputs, share_inputs=True, share_outputs=True).values()), None


if __name__ == "__main__":
    convert(sys.argv[1], Path(sys.argv[2]))
