"""Thresholds that several modules of the server read."""

from __future__ import annotations

# Maximum rank of a tensor in a request: NumPy 1 arrays have at most 32 dimensions.
MOST_DIMS = 32

# Inputs or outputs that a request may name beyond those of the function, so that the error can name the wrong one. A
# request that repeats a name a million times is refused after these.
SPARE_TENSORS = 16

# Bytes of JSON, or of numbers in a gRPC message, up to which the event loop parses a request itself. A larger one goes
# to a separate process, because the event loop serves no other client meanwhile. At this size parsing takes 1.2 ms for
# numbers as text, 20 ns a byte; the round trip to a process takes 1 ms.
INLINE_BYTES = 1 << 16

# Bytes that a converter process may use in addition to its parsing memory; one that used more exits, so that its memory
# is freed. The interpreter and NumPy take 40 MB.
SPARE_CONVERTER_BYTES = 256 << 20

# Bytes of a piece of a response. A longer response is sent in pieces, each when the client has read most of the
# previous ones. asyncio regards a buffer as full at 64 KiB; a client that reads nothing occupies one piece more.
PIECE_BYTES = 1 << 16

# Connections above the limit that may still send health checks. A check takes a millisecond, and so does a new
# connection that closes the oldest of these.
SPARE_CONNECTIONS = 64

# Connections that may be in the TLS handshake; one more closes the oldest. A handshake takes the server 1 to 2 ms, and
# two round trips to the client.
HANDSHAKES = 64

# Bytes of free memory at the end of the heap that a gRPC server retains for the next message. The system clears new
# memory page by page, and no other client is served meanwhile. Receiving 16 MiB takes 5 ms in retained memory and 18 to
# 25 ms in new memory.
RETAINED_BYTES = 64 << 20

# Copies of a gRPC response in memory until its client has read it: one here and one in the library.
COPIES = 2

# Maximum number of tokens that a request may ask for, more than any model's context. A stream occupies a place in the
# queue until it ends.
MOST_TOKENS = 1 << 20
