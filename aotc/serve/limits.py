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
