"""Models to start from, as bytecode and as blobs of ``jax.export``, and changes of bytes in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch

EDGES = (0, 1, 0x7F, 0x80, 0xFF)


@cache
def blobs() -> tuple[bytes, ...]:
    """Serialised exports: constants, control flow, symbolic sizes, small types, a sort, a custom call."""
    (b,) = export.symbolic_shape("b")
    x, i = np.ones((3, 4), "f4"), np.int32(2)
    models: list[tuple[Callable, tuple]] = [
        (lambda x: jax.nn.softmax(x @ jnp.ones((4, 8))), (x,)),
        (lambda x, i: lax.while_loop(lambda s: s[0] < i, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x)), (x, i)),
        (lambda x, i: lax.switch(i, [jnp.sort, lambda x: x * 2, lambda x: jnp.cumsum(x, 0)], x), (x, i)),
        (lambda x: jnp.concatenate([x, x]).sum(0), (jax.ShapeDtypeStruct((b, 4), np.float32),)),
        (lambda x: x.astype(jnp.bfloat16) + jnp.arange(4, dtype=jnp.bfloat16), (x,)),
        (lambda x, i: x.at[i].add(1)[i, ::-1], (x, i)),
        (lambda x: {"s": jnp.linalg.cholesky(x @ x.T + jnp.eye(3)), "f": jnp.fft.fft(x)}, (x,)),
    ]
    return tuple(bytes(export.export(jax.jit(f))(*arguments).serialize()) for f, arguments in models)


@cache
def codes() -> tuple[bytes, ...]:
    """The same as MLIR bytecode."""
    return tuple(bytes(fetch(blob).data) for blob in blobs())


def changed(sources: tuple[bytes, ...], number: int) -> bytes:
    """Return one of the sources with flipped, replaced, inserted, deleted, moved or cut bytes."""
    rng = random.Random(number)
    data = bytearray(rng.choice(sources))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data)) if data else 0
        length = rng.choice((1, 2, 4, 8, 32))
        match rng.randrange(8):
            case 0 | 1 | 2 if data:
                data[at] ^= rng.randrange(1, 256)
            case 3 if data:
                data[at] = rng.choice(EDGES)
            case 4:
                del data[at : at + length]
            case 5:
                data[at:at] = rng.randbytes(length)
            case 6:
                other = rng.choice(sources)
                start = rng.randrange(len(other))
                data[at : at + length] = other[start : start + length]
            case 7:
                data = data[:at] if rng.random() < 0.5 else data + rng.randbytes(length)
    return bytes(data)


def read(data: bytes) -> str:
    """Read and import a model; return what became of it."""
    try:
        import_raw(fetch(data))
    except CompileError as error:
        return "ends the child, an error here" if "cannot be read: MLIR crashes" in str(error) else "refused"
    except KeyboardInterrupt:
        return "reading takes long, which Ctrl-C ended"
    return "accepted"


def compiled(data: bytes) -> str:
    """Compile a model that is read; return what became of it."""
    word = read(data)
    if word != "accepted":
        return word
    try:
        aotc.compile(data, cache=False, jobs=1, opt_level=0)
    except CompileError:
        return "refused"
    return "compiled"
