"""Thresholds that several modules of the server read."""

from __future__ import annotations

# Dims: the shape of a tensor in a request has no more. NumPy 1 arrays have at most 32.
MOST_DIMS = 32

# Tensors, parameters: a request may name so many more inputs or outputs than the function has, so that the error can
# name the wrong one. A request that repeats a name a million times is refused after these.
SPARE_TENSORS = 16

# Bytes of JSON, or of numbers in a message of gRPC: larger requests are parsed by another process; the event loop
# serves nobody meanwhile. Measured: 1.2 ms for numbers as text, 20 ns a byte; to hand them to a process and back takes
# 1 ms.
INLINE_BYTES = 1 << 16

# Bytes: what a process that parses may take beside; one that has taken more ends, so that its memory is free again. The
# interpreter and NumPy have 40 MB.
SPARE_CONVERTER_BYTES = 256 << 20

# Bytes of an answer: a longer answer is sent in such pieces, each when the client has read most of those before.
# asyncio calls a buffer full at 64 KiB; one piece more is what a client that reads nothing holds.
PIECE_BYTES = 1 << 16

# Connections: so many above the limit may ask for the server's health. A question takes a millisecond; so does a new
# connection that closes the oldest of these.
SPARE_CONNECTIONS = 64

# Connections: so many may be in the handshake of TLS; for one more the oldest is closed. A handshake takes the server 1
# to 2 ms and the client two round trips.
HANDSHAKES = 64

# Bytes of free memory at the end of the heap: a server of gRPC keeps them for the next message; new memory is cleared
# page by page while nobody else is served. Measured: receiving 16 MiB takes 5 ms in memory that was used before, 18 to
# 25 ms in new memory.
RETAINED_BYTES = 64 << 20

# Copies: an answer of gRPC is in memory so often until its client has read it. Ours, and that of the library.
COPIES = 2

# Tokens: no request may ask for more; a stream holds a place of the queue until it ends. More than any model's context.
MOST_TOKENS = 1 << 20
