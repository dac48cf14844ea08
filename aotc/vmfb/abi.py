"""The contracts between compiler and runtime: kernels and command buffers.

Kernel (CPU)
    ``void kernel(void **buffers, int64_t *dims, int64_t begin, int64_t end, void *scratch)``
    ``buffers`` holds the inputs, then the outputs; ``dims`` the kernel's int64
    parameters; ``[begin, end)`` is a range of its grid; ``scratch`` is 64-byte
    aligned memory that belongs to the calling worker, of the size the kernel
    declares. A library of kernels exports one table, :data:`TABLE_SYMBOL`: an
    array of function addresses in the order of the bundle's kernel list. For each
    function that it imports from another library it exports a pointer,
    :data:`IMPORT_PREFIX` and the name, which the loader fills in.

Command buffer
    One flat array of int64 words, a sequence of *nodes*. It is position
    independent and is executed by one call into the executor. Small integers
    that may depend on the call are *operands*: ``2*c`` is the constant ``c``,
    ``2*i + 1`` is entry ``i`` of the submission's parameter array.

    A *place* is two words: slot number, byte offset operand. Slots are the
    pointer table of a submission: arguments, results, arenas, constants.

    ``GRAPH, words, commands, state, serial, offset_0 ... offset_{n-1}`` then the
    commands: an acyclic graph. ``words`` is the node's length; ``state`` the
    number of the first of its commands' cells in the submission's state memory
    (:data:`STATE_WORDS` words a command); ``serial`` is 1 if it is so small that
    the caller runs it alone; ``offset_i`` counts words from the start of the node.

    A command: ``kind, kernel, items, grain, preds, n_succs, n_places, n_dims,``
    ``succs..., places (2 words each)..., dims (operands)...``. ``kind`` is
    :data:`DISPATCH`; ``kernel`` is a number that the loader replaces by the
    function's address; ``items`` is an operand, the grid; ``grain`` how many grid
    items a worker claims at once (an operand). :data:`COPY` has two places
    (source, destination) and one dim operand (bytes).

    ``WHILE, words, cond_words, body_words, slot, offset`` then the condition's
    nodes, then the body's: runs the condition, reads the byte at the place, and
    while it is not 0 runs the body and the condition again.

    ``CASE, words, branches, slot, offset, words_0 ... words_{n-1}`` then the
    branches' nodes: runs branch number i32-at-place, the last if out of range.
"""

from __future__ import annotations

EXECUTOR_VERSION = 1
TABLE_SYMBOL = "aotc_kernels"
IMPORT_PREFIX = "aotc_import_"
ALIGNMENT = 64

GRAPH, WHILE, CASE = 1, 2, 3
DISPATCH, COPY = 0, 1

GRAPH_HEADER = 5
COMMAND_HEADER = 8
STATE_WORDS = 8

MAX_PLACES = 256
MAX_DIMS = 64
MAX_NESTING = 32


def constant(value: int) -> int:
    """Return the operand word of a constant."""
    return 2 * value


def parameter(index: int) -> int:
    """Return the operand word of entry ``index`` of the parameter array."""
    return 2 * index + 1
