"""Continuous batching: one call decodes the next token of several sequences, which join and leave between steps.

A step of a batch starts when all its sequences have selected their last token, or a short time after the first: a
client that reads its tokens slowly does not block the others. The model state (KV cache) of a batch stays in place
from step to step. Only when sequences join or leave are its rows copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np

from aotc.serve.batching import row_view
from aotc.serve.errors import BAD, RequestFault
from aotc.serve.generate.capabilities import DECODE, PREFILL, batch_axes
from aotc.vmfb.dtypes import limits, to_numpy
from aotc.vmfb.module import LoadedModule
from aotc.vmfb.results import DEVICE
from aotc.vmfb.submit.fence import Fence

State = list[Any]
StepRequest = tuple[np.ndarray, "asyncio.Future[np.ndarray]"]  # a token, and the future of its result
StateSizes = tuple[tuple[int, ...], ...]  # of each array of a state, without the batch dim


class GeneratedSequence:
    """A sequence during its generation, with its model state (KV cache).

    Attributes
    ----------
    state : list of arrays
        Empty while the sequence is in a batch, which then owns the state.
    batch : DecodeBatch or None
        The batch that decodes the sequence.
    """

    __slots__ = ("batch", "state")

    def __init__(self, state: State) -> None:
        self.state = state
        self.batch: DecodeBatch | None = None


class Decoder:
    """Caller of ``prefill`` and ``decode``, the two generation functions of a model.

    Parameters
    ----------
    module : LoadedModule
        The model, whose functions have been checked.
    name : str
        The model's name, for errors.
    most : int
        Maximum number of sequences in a batch; 1 disables batching.

    Attributes
    ----------
    why_alone : str
        The reason why sequences are not batched; "" if they are.
    observe : callable
        Called with the number of sequences of each step.
    batches : list of DecodeBatch
        The current batches.
    """

    def __init__(self, module: LoadedModule, name: str, most: int) -> None:
        self.module, self.most, self._name = module, most, name
        self.results = DEVICE if module.gpus else ""
        self.axes, self.why_alone = batch_axes(module) if most > 1 else ((), "--max-batch is 1")
        self.observe: Callable[[int], object] = _ignore_decoded_count
        self.batches: list[DecodeBatch] = []
        dims = module.functions[DECODE].signature.arguments[0]["dims"]
        self._takes_many = len(dims) > 1 and isinstance(dims[-1], str)

    async def begin(self, tokens: np.ndarray) -> tuple[np.ndarray, GeneratedSequence]:
        """Run ``prefill`` on the tokens of a new sequence; return the model's first result, and the sequence."""
        asked = self._token_argument(PREFILL, tokens)
        sequence = GeneratedSequence([])
        return await self._prefill(asked, sequence), sequence

    async def _prefill(self, asked: np.ndarray, sequence: GeneratedSequence) -> np.ndarray:
        """Run ``prefill``, which makes the state of a sequence; return its first result."""
        first, *sequence.state = await self.module.submit(PREFILL, asked, results=self.results)
        return np.asarray(first)

    async def _decode(self, asked: np.ndarray, sequence: GeneratedSequence) -> np.ndarray:
        """Run ``decode`` for one sequence; return its first result."""
        first, *sequence.state = await self.module.submit(
            DECODE, asked, *sequence.state, donate=True, results=self.results
        )
        return np.asarray(first)

    async def decode_tokens(self, sequence: GeneratedSequence, tokens: np.ndarray) -> np.ndarray:
        """Append tokens to a sequence by ``decode``; return the model's first result.

        Cancellation of this call loses the sequence.
        """
        first = np.empty(0)
        for some in [tokens] if self._takes_many else (tokens[n : n + 1] for n in range(len(tokens))):
            asked = self._token_argument(DECODE, some)
            if self.why_alone:
                first = await self._decode(asked, sequence)
            else:
                future: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
                self.batch_with_free_row(sequence).request_step(sequence, (asked, future))
                first = await future
        return np.asarray(first)

    def leave(self, sequence: GeneratedSequence, keep: bool) -> None:
        """Remove a sequence from its batch; with ``keep``, its state is copied out of the batch."""
        if sequence.batch is not None:
            sequence.batch.leave(sequence, keep)

    def batch_with_free_row(self, sequence: GeneratedSequence) -> DecodeBatch:
        """Return a batch with a free row for a sequence, or a new batch."""
        if sequence.batch is not None:
            return sequence.batch
        sizes = self.sizes(sequence.state)
        for batch in self.batches:
            if batch.sizes == sizes and len(batch.members) < self.most:
                return batch
        self.batches.append(DecodeBatch(self, sizes))
        return self.batches[-1]

    def sizes(self, state: State) -> StateSizes:
        """Return the sizes of a state without the batch dim."""
        return tuple([x.shape[:at] + x.shape[at + 1 :] for x, at in zip(state, self.axes)])

    def _token_argument(self, name: str, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens to the argument of a function: an array with the tokens in its last dim; other dims are 1.

        Raises
        ------
        RequestFault
            If the function takes another number of tokens, or its dtype cannot represent one of them.
        """
        row, where = self.module.functions[name].signature.arguments[0], f"{self._name}.{name}"
        shape = [1] * (len(row["dims"]) - 1) + [len(tokens)] if row["dims"] else []
        fits = all(isinstance(d, str) or d == n for d, n in zip(row["dims"], shape)) and (shape or len(tokens) == 1)
        if not fits:
            raise RequestFault(BAD, where, "its number of tokens differs", len(tokens), row["dims"])
        low, high = limits(row["dtype"])
        least, largest = (int(tokens.min()), int(tokens.max())) if tokens.size else (0, 0)
        if not low <= least <= largest <= high:
            raise RequestFault(BAD, where, "a token is out of range", max(least, largest, key=abs), f"{low} to {high}")
        return tokens.astype(to_numpy(row["dtype"])).reshape(shape)


# Seconds that a decoding step of a batch waits for a sequence whose client has not read its last token. Many iterations
# of the event loop, and less than people notice.
BATCH_PATIENCE_SECONDS = 5e-3


class DecodeBatch:
    """A batch of sequences that are decoded together.

    Attributes
    ----------
    members : set of GeneratedSequence
        The sequences.
    sizes : tuple
        State sizes of each member.
    """

    def __init__(self, decoder: Decoder, sizes: StateSizes) -> None:
        self.members: set[GeneratedSequence] = set()
        self.sizes = sizes
        self._decoder = decoder
        self._rows: list[GeneratedSequence | None] = []  # sequences of the state's rows; None if it has left
        self._state: State = []
        self._requests: dict[GeneratedSequence, StepRequest] = {}
        self._stepping: Sequence[GeneratedSequence] = ()
        self._call: Fence | None = None
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def request_step(self, sequence: GeneratedSequence, request: StepRequest) -> None:
        """Add a sequence to the batch's next decoding step."""
        self.members.add(sequence)
        sequence.batch = self
        self._requests[sequence] = request
        self._news.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def leave(self, sequence: GeneratedSequence, keep: bool) -> None:
        """Remove a sequence from the batch; with ``keep``, its state is copied out of the batch.

        A call is cancelled when all its members have left.
        """
        if sequence in self._rows:
            row = self._rows.index(sequence)
            if keep:
                arrays = zip(self._state, self._decoder.axes)
                sequence.state = [row_view(np.asarray(x), row, at).copy() for x, at in arrays]
            self._rows[row] = None
        self.members.discard(sequence)
        self._requests.pop(sequence, None)
        sequence.batch = None
        if self._call is not None and self.members.isdisjoint(self._stepping):
            self._call.cancel()
        self._news.set()

    async def _run(self) -> None:
        """Decode steps until the batch has no members."""
        try:
            while await self._wait_for_members():
                sequences = self._next_sequences()
                if sequences:
                    await self._decode_step(sequences)
        except Exception as error:  # rows cannot be concatenated, for instance on a lost GPU
            _fail_sequences(list(self._requests.values()), error)
        finally:
            self._decoder.batches.remove(self)

    async def _wait_for_members(self) -> bool:
        """Wait until all members have requested a step, or for a short time after the first request.

        Return False if no members are left.
        """
        loop, until = asyncio.get_running_loop(), inf
        timer = None
        while self.members and len(self._requests) < len(self.members) and loop.time() < until:
            self._news.clear()
            if self._requests and timer is None:
                until = loop.time() + BATCH_PATIENCE_SECONDS
                timer = loop.call_at(until, self._news.set)
            await self._news.wait()
        if timer is not None:
            timer.cancel()
        return bool(self.members)

    def _next_sequences(self) -> list[GeneratedSequence]:
        """Select the sequences of the next step.

        Late members leave with their state; members with other state sizes move to another batch.
        """
        sequences = [t for t in self._rows if t is not None and t in self._requests]
        new = [t for t in self._requests if t not in sequences]
        if new and not sequences:
            self.sizes = self._decoder.sizes(new[0].state)
        for sequence in new:
            if self._decoder.sizes(sequence.state) == self.sizes:
                sequences.append(sequence)
                continue
            asked = self._requests[sequence]
            self.leave(sequence, False)
            self._decoder.batch_with_free_row(sequence).request_step(sequence, asked)
        for late in self.members.difference(sequences):
            self.leave(late, True)
        return sequences

    async def _decode_step(self, sequences: list[GeneratedSequence]) -> None:
        """Call ``decode`` for ``sequences``, update the state in place, and set the futures of the results."""
        asked = [self._requests.pop(t) for t in sequences]
        decoder, self._stepping = self._decoder, sequences
        try:
            if sequences != self._rows:
                pieces, state = [self._row_or_state(t) for t in sequences], self._state
                self._rows, self._state = list(sequences), []
                self._state = await asyncio.to_thread(_concatenated_states, state, pieces, decoder.axes)
            tokens = np.concatenate([token for token, _ in asked])
            self._call = decoder.module.submit(DECODE, tokens, *self._state, donate=True, results=decoder.results)
            results, *self._state = await self._call
            first = np.asarray(results)
            self.sizes = decoder.sizes(self._state)
            decoder.observe(len(sequences))
        except Exception as error:  # the state may be partially updated: no longer usable
            self._rows, self._state = [], []
            _fail_sequences(asked, error)
        else:
            for row, (_, future) in enumerate(asked):
                if not future.done():
                    future.set_result(first[row : row + 1])
        finally:
            self._stepping, self._call = (), None

    def _row_or_state(self, sequence: GeneratedSequence) -> int | State:
        """Return the state of a member for the next step: its row number in the batch, or the state of a new one."""
        if sequence in self._rows:
            return self._rows.index(sequence)
        state, sequence.state = sequence.state, []
        return state


def _concatenated_states(state: State, pieces: Sequence[int | State], axes: Sequence[int]) -> State:
    """Concatenate the states of several sequences along the batch axes."""
    first = pieces[0]
    if len(pieces) == 1 and not isinstance(first, int):
        return first
    concatenated = []
    for number, axis in enumerate(axes):
        whole = np.asarray(state[number]) if state else np.empty(0)
        parts = [row_view(whole, p, axis) if isinstance(p, int) else np.asarray(p[number]) for p in pieces]
        concatenated.append(np.concatenate(parts, axis))
    return concatenated


def _fail_sequences(asked: Sequence[StepRequest], error: Exception) -> None:
    for _, future in asked:
        if not future.done():
            future.set_exception(error)


def _ignore_decoded_count(sequences: int) -> None:
    """Ignore the number of decoded sequences: the default for ``observe``."""
