"""Programs whose kernels compute-sanitizer watches: one for each template and algorithm, small, for it is slow.

``python sanitized.py FOLDER`` runs what :func:`write` put into a folder, in a process that neither compiles nor imports
jax: what is watched is aotc's. With ``--apart`` commands are no graphs, but launched one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

BF16 = np.dtype(bfloat16)


def attention_of_product(x, w):
    """Return attention of slices of a matmul's result."""
    import jax

    return jax.nn.dot_product_attention(*jax.numpy.split((x @ (w / 8)).reshape(2, 77, 6, 64), 3, 2))


def cases():
    """Functions with their arguments and flags, by name."""
    import jax
    import jax.numpy as jnp
    from lowering.test_shared_limits import conv, gemm
    from support.differential import integers, normal

    lax = jax.lax

    def short(*shape, dtype=jnp.bfloat16):
        return normal(*shape).astype(dtype)

    def until(x):
        return lax.while_loop(lambda s: s.sum() < 100, lambda s: jnp.sin(s) * 0.5 + s + s.max(), x)

    def steps(n, x):
        return lax.fori_loop(0, n, lambda i, c: jnp.tanh(c @ x) + i, x)

    def segments(x, i):
        return jax.ops.segment_sum(x, i, 70), jax.ops.segment_max(x, i % 3, 3), jax.ops.segment_sum(x, i % 2, 2)

    def factors(a, b):
        lower = jnp.linalg.cholesky(a)
        return lower, lax.linalg.triangular_solve(lower, b, left_side=True, lower=True)

    def rows(x, i, u):
        return x.at[i].set(u), x[i], x.at[i, 0].add(1.0)

    x, n = normal(3000), np.arange(3000, dtype="int32")
    positive = np.eye(70, dtype="f4") * 3 + 0.01
    attention = (jax.nn.dot_product_attention, [short(1, 70, 2, 64)] * 3)
    return {
        "wgmma": (gemm, [short(130, 72), short(72, 136)]),
        "wgmma tf32": (gemm, [normal(130, 72), normal(72, 136)]),
        "wgmma i8": (gemm, [integers(130, 64, dtype="int8"), integers(64, 136, dtype="int8")]),
        "mma": (gemm, [short(130, 72), short(72, 136)], {"target": "cuda:compute_80"}),
        "matvec": (gemm, [short(1, 512), short(512, 136)]),
        "exact": (lambda x, w: jnp.dot(x, w, precision="highest"), [normal(70, 50), normal(50, 90)]),
        "conv": (conv, [short(2, 9, 9, 64), short(3, 3, 64, 72)]),
        "conv by warps": (conv, [short(2, 9, 9, 64), short(3, 3, 64, 72)], {"target": "cuda:compute_80"}),
        "attention": attention,
        "attention of a product": (attention_of_product, [short(2, 77, 72), short(72, 384)], {"guard": True}),
        "attention by warps": (*attention, {"target": "cuda:compute_80"}),
        "softmax": (lambda x: (jax.nn.softmax(x), x.sum(0), x.T + 1, jnp.argmax(x, 1)), [normal(60, 700)]),
        "long rows": (jax.nn.softmax, [normal(2, 70_000)]),
        "scan": (lambda x: (jnp.cumsum(x), lax.cummax(x, reverse=True)), [x]),
        "sort": (lambda x: (jnp.sort(x), jnp.argsort(x.reshape(30, 100), 1)), [x]),
        "long sort": (jnp.sort, [normal(40_000)]),
        "top_k": (lambda x: (*lax.top_k(x, 100), *lax.top_k(x.reshape(3, -1), 5)), [x]),
        "segments": (segments, [x, n % 70]),
        "scatter": (rows, [normal(50, 30), n[:40] * 7 % 60, normal(40, 30)]),
        "fft": (jnp.fft.fft, [normal(4, 512).astype("complex64")]),
        "factors": (factors, [np.stack([positive] * 3), normal(3, 70, 20)]),
        "pivots": (lambda x: lax.linalg.lu(x)[0], [normal(3, 70, 70)]),
        "random": (lambda k: jax.random.normal(k, (999,)), [np.array([1, 2], "u4")]),
        "loop": (until, [normal(4, 40, scale=0.3)]),
        "driver's loop": (steps, [np.int32(3), normal(200, 200, scale=0.05)]),
    }


def write(folder: Path, name: str) -> None:
    """Compile a case into a folder, with its arguments and what XLA makes of them."""
    import jax

    import aotc

    function, arrays, *flags = cases()[name]
    options = {"target": "cuda:sm_90a", **(flags[0] if flags else {})}
    path = folder / name.replace(" ", "_").replace("'", "")
    path.with_suffix(".vmfb").write_bytes(aotc.compile(jax.jit(function), *arrays, **options))
    with jax.default_matmul_precision("highest"):
        want = jax.tree.leaves(jax.jit(function)(*arrays))
    _keep(path.with_suffix(".arguments.npz"), arrays)
    _keep(path.with_suffix(".want.npz"), want)


def _keep(path: Path, arrays: Sequence[object]) -> None:
    """Write arrays, those of bf16, which files have not, as their bits."""
    held = map(np.asarray, arrays)
    np.savez(path, **{f"{n:02} {x.dtype}": x.view("u2") if x.dtype == BF16 else x for n, x in enumerate(held)})


def _kept(path: Path) -> list[np.ndarray]:
    with np.load(path) as held:
        return [held[name].view(BF16) if name.endswith(" bfloat16") else held[name] for name in held.files]


def run(path: Path) -> str:
    """Run a case twice, as graphs are recorded at the first call; return what is wrong."""
    import aotc

    module = aotc.load(path, devices="cuda")
    arrays, want = _kept(path.with_suffix(".arguments.npz")), _kept(path.with_suffix(".want.npz"))
    for _ in range(2):
        for n, (a, b) in enumerate(zip(module.invoke("main", *arrays), want, strict=True)):
            wide = "c16" if b.dtype.kind == "c" else "f8"
            error = np.linalg.norm(np.asarray(a).astype(wide) - b.astype(wide))
            if not error <= 1e-2 * np.linalg.norm(b.astype(wide)):
                return f"result {n} is wrong by {error:.3g}"
    return ""


def launch_apart() -> None:
    """Have the runtime launch commands one by one, as it does at addresses that come once."""
    from aotc.vmfb.devices.cuda.program import CudaProgram

    made = CudaProgram.__init__
    CudaProgram.__init__ = lambda self, *arguments: made(self, *arguments[:5], record=False)


if __name__ == "__main__":
    wrong = 0
    if "--apart" in sys.argv:
        launch_apart()
    for bundle in sorted(Path(sys.argv[1]).glob("*.vmfb")):
        what = run(bundle)
        wrong += bool(what)
        print(f"{bundle.stem}: {what or 'right'}", flush=True)  # beside what the tool says of it
    sys.exit(bool(wrong))
