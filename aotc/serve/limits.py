"""Thresholds of the server. Each has its unit, why it is there, and where its value is from."""

from __future__ import annotations

WATCH_SECONDS = 5e-3
"""unit: seconds of a request
why: who takes longer is looked after: if its client leaves, the call is cancelled; a shorter one ends by itself
from: chosen: to look costs a task, some 20 us
"""

LATENCIES = 512
"""unit: requests
why: so many of the last ones of a model are drawn on the page and counted in its quantiles
from: chosen
"""

PROBE_ROWS = 3
"""unit: rows
why: a model is batched if so many rows give together what each gives alone
from: chosen: the first, the last and one between
"""

PROBE_SIZES = (8, 16, 32, 1, 4)
"""unit: elements of a symbolic dim other than the rows
why: sizes that are tried for the proof that rows are independent, until the model takes one
from: chosen
"""

PROBE_TOLERANCE = 2e-2
"""unit: of the greatest value of a result
why: products of several rows may round otherwise than those of one; rows that are mixed differ by more
from: reasoning: a few roundings of bf16, 2**-8 each
"""

BACKLOG = 1024
"""unit: connections
why: so many may wait to be taken while the server is busy
from: chosen: more than the queue has by default
"""

ERROR_LETTERS = 4000
"""unit: letters of an error's text
why: a message may show what the client sent, who need not have all of it back
from: chosen
"""

MOST_MICROSECONDS = 1e18
"""unit: microseconds
why: a timeout that a request asks for is below it; integers of JSON may have more digits than a float can hold
from: chosen: 30,000 years
"""

MOST_TEMPERATURE = 1e9
"""unit: of the difference of two logits
why: a temperature that a request asks for is below it; integers of JSON may have more digits than a float can hold
from: chosen: all tokens are equally likely long before
"""

MOST_ELEMENTS = 1 << 56
"""unit: elements
why: a shape without its zeros has fewer: NumPy counts bytes in 64 bits, also for arrays without elements
from: reasoning: 2**63 bytes, elements of up to 16 bytes, and room
"""

MOST_DIMS = 32
"""unit: dims
why: the shape of a tensor in a request has no more
from: reasoning: NumPy 1 arrays have at most 32
"""

MOST_NESTING = 64
"""unit: lists within lists
why: the data of a tensor in JSON nests no deeper
from: reasoning: NumPy arrays have at most 64 dims
"""

SPARE_TENSORS = 16
"""unit: tensors, parameters
why: a request may name so many more inputs or outputs than the function has, so that the error can name the wrong one
from: chosen: a request that repeats a name a million times is refused after these
"""

INLINE_BYTES = 1 << 16
"""unit: bytes of JSON, or of numbers in a message of gRPC
why: larger requests are parsed by another process: the event loop serves nobody meanwhile
from: measured: 1.2 ms for numbers as text, 20 ns a byte; to hand them to a process and back takes 1 ms
"""

INLINE_ELEMENTS = 1 << 13
"""unit: elements of the results that an answer has as numbers
why: longer answers are written by another process: the event loop serves nobody meanwhile
from: measured: 5 ms for f32, 0.6 us each
"""

CONVERTERS = 2
"""unit: processes
why: so many large requests and answers are converted at a time; others wait
from: chosen: one that takes long does not stop all others; each may take the memory of EXPANSION
"""

EXPANSION = 48
"""unit: bytes for each byte of JSON
why: a process that parses may take so much memory, then the request is refused
from: reasoning: the worst document, of objects with one entry, takes 30; arrays and text are made of it
"""

SPARE_CONVERTER_BYTES = 256 << 20
"""unit: bytes
why: what a process that parses may take beside; one that has taken more ends, so that its memory is free again
from: chosen: the interpreter and NumPy have 40 MB
"""

NUMBER_BYTES = 4
"""unit: bytes
why: a number of a result that is sent as text counts as so many at least
from: reasoning: its text and its object in Python have the same size whatever its type
"""

FREE_BYTES = 1 << 16
"""unit: bytes of a request
why: a request with so many is served though the memory of all requests is used up
from: chosen: the queue bounds what small requests take together: 16 MiB for 256
"""

MOST_FIELDS = 1 << 14
"""unit: fields of a message of gRPC
why: a large message with more is refused before it is decoded: an object in memory is made of each
from: chosen: more than any model has inputs; counted in 20 ms
"""

PIECE_BYTES = 1 << 16
"""unit: bytes of an answer
why: a longer answer is sent in such pieces, each when the client has read most of those before
from: asyncio calls a buffer full at 64 KiB; one piece more is what a client that reads nothing holds
"""

SLOWEST_READER = 1 << 16
"""unit: bytes per second
why: a client that reads its answer more slowly on average is left, so that it does not hold memory for ever
from: chosen: 0.5 Mbit/s
"""

SPARE_CONNECTIONS = 64
"""unit: connections
why: so many above the limit may ask for the server's health
from: chosen: a question takes a millisecond; so does a new connection that closes the oldest of these
"""

HANDSHAKES = 64
"""unit: connections
why: so many may be in the handshake of TLS; for one more the oldest is closed
from: chosen: a handshake takes the server 1 to 2 ms and the client two round trips
"""

TLS_BUFFER_BYTES = 1 << 16
"""unit: bytes
why: each connection of TLS reads into a buffer of its own, which no budget counts
from: chosen: asyncio has 256 KiB; a record of TLS has at most 16 KiB
"""

ACCEPTED_AT_ONCE = 16
"""unit: connections
why: the event loop takes so many before it reads: a question of health is read before newer connections close its own
from: reasoning: a quarter of SPARE_CONNECTIONS; a connection is read in the second turn of the loop after its own
"""

SPARE_FILES = 256
"""unit: files
why: a server opens so many besides its connections
from: reasoning: bundles, pipes of converters, the log
"""

MOST_PIPELINED = 64
"""unit: requests
why: a connection on which more wait behind the first one is closed
from: chosen: a read of 256 KiB may bring thousands, each of which takes memory; clients send one or a few
"""

READ_BYTES = 1 << 18
"""unit: bytes
why: a head is measured when it ends; one that has not ended after a read more than it may have never does
from: reasoning: asyncio reads so many at a time
"""

LOOKS = 4
"""unit: looks at a connection
why: in the shortest time that a connection has it is looked at so often: it is closed a quarter late at most
from: chosen
"""

MOST_LOOK_SECONDS = 1.0
"""unit: seconds
why: connections are looked at after so long
from: chosen: a look at 512 takes 0.3 ms
"""

SLOWEST_GRPC_READER = 1 << 20
"""unit: bytes per second
why: a client of gRPC that reads its answer more slowly is left: how much of it it has read is not known
from: chosen: 8 Mbit/s
"""

LARGEST_HEAP_BLOCK = 32 << 20
"""unit: bytes
why: a larger block is mapped and given back by itself, so that all its pages are new in each message
from: glibc: the greatest value that M_MMAP_THRESHOLD may have
"""

RETAINED_BYTES = 64 << 20
"""unit: bytes of free memory at the end of the heap
why: a server of gRPC keeps them for the next message: new memory is cleared page by page while nobody else is served
from: measured: receiving 16 MiB takes 5 ms in memory that was used before, 18 to 25 ms in new memory
"""

LOOK_AT_READS_SECONDS = 0.02
"""unit: seconds
why: the memory of messages that are being received is measured so often while there are such
from: measured: a look takes 30 us; clients of the same machine send up to 2 GB/s, 40 MB meanwhile
"""

PENDING_SECONDS = 0.05
"""unit: seconds
why: a message that is longer on its way may be ended in want of memory
from: chosen: most messages are whole in a millisecond
"""

COPIES = 2
"""unit: copies
why: an answer of gRPC is in memory so often until its client has read it
from: reasoning: ours, and that of the library
"""

USUAL_TOKENS = 64
"""unit: tokens
why: so many are made if a request does not say how many
from: chosen
"""

MOST_TOKENS = 1 << 20
"""unit: tokens
why: no request may ask for more: a stream holds a place of the queue until it ends
from: chosen: more than any model's context
"""

LAST_WORD_SECONDS = 0.5
"""unit: seconds
why: an error that ends a stream is sent if the client takes it in this time; one that takes nothing is left
from: chosen
"""

CREW_PATIENCE_SECONDS = 5e-3
"""unit: seconds
why: texts that are decoded together wait so long for one whose client has not taken its last token
from: chosen: many turns of the event loop; less than people see
"""

SEQUENCE_LETTERS = 128
"""unit: letters
why: names of sequences are kept
from: chosen: a UUID has 36
"""

STREAM_REQUESTS = 32
"""unit: requests
why: so many of one stream of gRPC are under way at a time; the next is read when one of them is done
from: chosen: more than a client usually has open, far fewer than the queue
"""

SPARE_RPCS = 64
"""unit: calls of gRPC
why: so many more than the queue holds are read, to be refused with a reason or to ask after the server's health
from: chosen: each may hold a message of the greatest size
"""
