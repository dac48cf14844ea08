"""Models that generate: the next token is the sum of all before it, modulo 97; the state remembers each of them."""

import json
import socket

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import aotc

VOCABULARY, MOST = 97, 64


def prefill(tokens):
    """``tokens`` is [1, n]; the cache has a dim of layers before that of texts."""
    n = tokens.shape[1]
    cache = jnp.zeros((1, 1, MOST), jnp.int32)
    cache = jax.lax.dynamic_update_slice(cache, tokens[None].astype(jnp.int32), (0, 0, 0))
    return logits(cache), {"cache": cache, "position": jnp.full((1,), n, jnp.int32)}


def decode(token, state):
    """``token`` is [b, 1]."""
    cache, position = state["cache"], state["position"]
    rows = jnp.arange(token.shape[0])
    cache = cache.at[0, rows, position].set(token[:, 0], mode="drop")
    return logits(cache), {"cache": cache, "position": position + 1}


def mixing(token, state):
    """As :func:`decode`, but each text depends on the others."""
    first, state = decode(token, state)
    return first + first.sum(0), state


def logits(cache):
    """Of the next token."""
    return jax.nn.one_hot(cache.sum((0, 2)) % VOCABULARY, VOCABULARY)


def bundle(step=decode, **options):
    """A bundle of ``prefill`` and such a ``decode``, any number of texts at a time."""
    (n,) = export.symbolic_shape("n", constraints=[f"n <= {MOST}"])
    (b,) = export.symbolic_shape("b")
    state = {"cache": jax.ShapeDtypeStruct((1, b, MOST), np.int32), "position": jax.ShapeDtypeStruct((b,), np.int32)}
    token = jax.ShapeDtypeStruct((b, 1), np.int32)
    functions = {"prefill": jax.jit(prefill), "decode": jax.jit(step, donate_argnums=1)}
    args = {"prefill": (jax.ShapeDtypeStruct((1, n), np.int32),), "decode": (token, state)}
    return aotc.compile(functions, args=args, **options)


def expected(tokens, count):
    """The tokens that follow."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[-count:]


class Stream:
    """A request for tokens over a connection of its own, whose events are read one by one."""

    def __init__(self, port, name, **parameters):
        data = json.dumps(parameters).encode()
        lines = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
        self.connection = socket.create_connection(("127.0.0.1", port), 20)
        self.connection.sendall(f"POST /v2/models/{name}/generate_stream HTTP/1.1\r\n{lines}\r\n".encode() + data)
        self._text = b""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.connection.close()

    def events(self):
        """Yield each event as it comes."""
        while True:
            while b"\n\n" not in self._text.partition(b"data: ")[2]:
                part = self.connection.recv(1 << 16)
                if not part:
                    return
                self._text += part
            event, _, self._text = self._text.partition(b"data: ")[2].partition(b"\n\n")
            yield json.loads(event)

    def tokens(self):
        """Return all tokens of a stream that ends well."""
        *events, last = self.events()
        assert "done" in last, last
        return [event["token"] for event in events]
