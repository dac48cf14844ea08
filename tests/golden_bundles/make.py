"""Write the golden bundles that are missing: ``python tests/golden_bundles/make.py``.

A bundle that exists stays as it is: it tests that later readers read what an earlier compiler wrote. Each is a bundle
next to the arguments of calls and XLA's or NumPy's results for them. The first eight are made here: symbolic sizes,
sizes that are read from memory, loops, branches, constants, an import. :mod:`features` has the others.

An ``.npz`` file of the first eight has ``a0``, ``r0``... for the arguments and results of one call of ``main``. The
others have ``main/1/a0`` for the first argument of the second call; elements of types that NumPy lacks are bytes.
``signed.vmfb`` is signed with a key that was thrown away; its public key is ``signed.key.pub``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from features import Golden, goldens, scaled_sum, xla
from jax import export, lax

import aotc
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

HERE = Path(__file__).parent
TARGET = "cpu:x86-64-v3"
IOTA = """
func.func @main(%n: tensor<i64>, %x: tensor<f32>) -> tensor<?xf32> {
  %s = stablehlo.reshape %n : (tensor<i64>) -> tensor<1xi64>
  %i = stablehlo.dynamic_iota %s, dim = 0 : (tensor<1xi64>) -> tensor<?xf32>
  %b = stablehlo.dynamic_broadcast_in_dim %x, %s, dims = [] : (tensor<f32>, tensor<1xi64>) -> tensor<?xf32>
  %r = stablehlo.multiply %i, %b : tensor<?xf32>
  return %r : tensor<?xf32>
}
"""
# What XLA runs in place of a model whose sizes it cannot know.
FIXED = {"iota": IOTA.replace("?", "6")}


def weights(*shape: int) -> np.ndarray:
    """The same numbers in every run."""
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype("f")


def mlp(x: Any) -> Any:
    """Constants, products, a softmax."""
    h = jax.nn.relu(x @ weights(8, 16) + weights(16))
    return jax.nn.softmax(h @ weights(16, 4))


def loop(n: Any, x: Any) -> Any:
    """A loop that is too large to be one kernel."""
    return lax.fori_loop(0, n, lambda _, y: jnp.tanh(y @ weights(96, 96) / 50), x)


def branch(i: Any, x: Any) -> Any:
    """Branches that are too large to be one kernel."""
    return lax.switch(i, [lambda x: x @ weights(64, 64), lambda x: x.T - 1, lambda x: jnp.sort(x, 0)], x)


def update(x: Any, i: Any, v: Any) -> Any:
    """Reads and writes where the data says."""
    return x.at[i].add(v), x[i], lax.dynamic_slice(x, (i[0], 0), (2, 3)), jnp.argsort(x, 0)


def solve(a: Any, b: Any) -> Any:
    """A library's functions."""
    return jnp.linalg.solve(a, b)


def batch(function: Callable[..., Any], *rest: int) -> Any:
    """Export a function of one array whose first dim is symbolic."""
    (b,) = export.symbolic_shape("b")
    return export.export(jax.jit(function))(jax.ShapeDtypeStruct((b, *rest), np.float32))


def fixed(function: Callable[..., Any], arguments: list[np.ndarray]) -> Any:
    """Export a function for the shapes of its arguments."""
    return export.export(jax.jit(function))(*arguments)


def models() -> dict[str, tuple[Any, list[np.ndarray]]]:
    """What is compiled, and the arguments of a call, by name."""
    square, index = weights(6, 5), np.array([4, 0, 4, -1], "i4")
    pairs: dict[str, tuple[Callable[..., Any], list[np.ndarray]]] = {
        "add": (lambda x, y: x + y * 2, [weights(4), weights(4)]),
        "loop": (loop, [np.int32(5), weights(96, 96)]),
        "branch": (branch, [np.int32(2), weights(64, 64)]),
        "update": (update, [square, index, weights(4, 5)]),
        "solve": (solve, [weights(5, 5), weights(5, 2)]),
    }
    made = {name: (fixed(function, arguments), arguments) for name, (function, arguments) in pairs.items()}
    made["mlp"] = batch(mlp, 8), [weights(3, 8)]
    made["sort"] = batch(lambda x: jnp.sort(x, 0)[::-1], 3), [weights(7, 3)]
    made["iota"] = IOTA, [np.array(6), np.float32(0.5)]
    return made


def write_first() -> None:
    """Write those of the first eight that are missing."""
    for name, (model, arguments) in models().items():
        if (HERE / f"{name}.vmfb").exists():
            continue
        (HERE / f"{name}.vmfb").write_bytes(aotc.compile(model, target=TARGET, debug_info=False))
        results = run_xla(fetch(FIXED.get(name, model)), arguments)
        arrays = {f"a{n}": x for n, x in enumerate(arguments)} | {f"r{n}": x for n, x in enumerate(results)}
        np.savez(HERE / f"{name}.npz", allow_pickle=False, **arrays)


def stored(array: Any) -> np.ndarray:
    """Return an array as NumPy can store it: bytes of what its files do not have."""
    array = np.asarray(array, order="C")
    return array if array.dtype.isbuiltin == 1 else array.view(np.uint8)


def write(name: str, golden: Golden) -> None:
    """Write one bundle with its calls."""
    options = {"target": TARGET, "debug_info": False, **golden.options}
    several = isinstance(golden.model, dict)
    examples = {"args": golden.examples} if several else {}
    data = aotc.compile(golden.model, *(() if several else golden.examples), cache=False, **examples, **options)
    arrays = {}
    for function, calls in golden.calls.items():
        reference = golden.reference.get(function) or xla(golden.model)
        results = reference() if golden.options.get("state") else [reference(*call) for call in calls]
        for number, (call, wanted) in enumerate(zip(calls, results, strict=True)):
            rest = [x for n, x in enumerate(call) if n not in golden.given]
            for letter, values in (("a", rest), ("r", wanted)):
                arrays |= {f"{function}/{number}/{letter}{n}": stored(x) for n, x in enumerate(values)}
    (HERE / f"{name}.vmfb").write_bytes(data)
    np.savez_compressed(HERE / f"{name}.npz", allow_pickle=False, **arrays)


def sign() -> None:
    """Sign ``signed.vmfb`` with a new key, of which the public half stays."""
    from aotc.tools.sign import new_key, sign_bundle

    with tempfile.TemporaryDirectory() as folder:
        public = new_key(f"{folder}/key")
        sign_bundle(str(HERE / "signed.vmfb"), f"{folder}/key")
        (HERE / "signed.key.pub").write_bytes(Path(public).read_bytes())


def main() -> None:
    """Write what is missing."""
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")  # sources say which line, not whose machine
    aotc.register_custom_call("golden_scaled_sum", scaled_sum)
    aotc.register_custom_call("golden_counts", native=False)
    os.chdir(HERE)  # files of weights are named next to the bundles
    write_first()
    for name, golden in goldens().items():
        if not (HERE / f"{name}.vmfb").exists():
            write(name, golden)
            if name == "signed":
                sign()


if __name__ == "__main__":
    main()
