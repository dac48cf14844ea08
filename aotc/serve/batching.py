"""Dynamic batching: concatenate concurrent requests along their first dim, and run them as one call.

The first dim must be symbolic and common to all arguments and results. A batch starts when it is full, or when its
first request has waited long enough and no other batch of the model is running. Only models whose rows are independent
are batched; a test at load time verifies that.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.errors import CallError, FenceCancelled
from aotc.vmfb.module import LoadedModule
from aotc.vmfb.results import NUMPY

SYMBOL = re.compile(r"[A-Za-z_]\w*\Z")
Observe = Callable[[int, float], object]


class _BatchMember:
    """A request in a batch, with its rows and the future of its results."""

    __slots__ = ("arrays", "begun", "future", "rows")

    def __init__(
        self, arrays: list[np.ndarray], future: asyncio.Future[list[np.ndarray]], begun: Callable[[], object]
    ) -> None:
        self.arrays, self.future, self.begun = arrays, future, begun
        self.rows = arrays[0].shape[0]


class _Batch:
    """Requests whose arrays differ only in their number of rows."""

    __slots__ = ("due", "key", "members", "rows", "task")

    def __init__(self, key: tuple[tuple[int, ...], ...]) -> None:
        self.key, self.rows, self.due = key, 0, False
        self.members: list[_BatchMember] = []
        self.task: asyncio.Task[None] | None = None


class Batcher:
    """Dynamic batcher of one function: collects requests and runs them as one call.

    Parameters
    ----------
    module, function
        The function to call.
    most : int
        Maximum number of rows of a batch.
    delay : float
        Maximum seconds that the first request waits.
    sizes : sequence of int
        Numbers of rows to which batches are padded: those for which the bundle is specialized.

    Attributes
    ----------
    observe : callable
        Called with the rows and the seconds of each batch.
    """

    def __init__(self, module: LoadedModule, function: str, most: int, delay: float, sizes: Sequence[int] = ()) -> None:
        self.most = most
        self.observe: Observe = _ignore_batch_observation
        self._module, self._function, self._delay = module, function, delay
        self._wanted = NUMPY if module.gpus else ""
        self._sizes = sorted(n for n in sizes if n <= most)
        self._open: dict[Any, _Batch] = {}
        self._waiting: deque[_Batch] = deque()
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def can_batch(self, arrays: Sequence[np.ndarray]) -> bool:
        """Return True if a request can be batched: all arrays have the same number of rows, from 1 to the maximum."""
        rows = arrays[0].shape[0]
        return 0 < rows < self.most and all(a.shape[0] == rows for a in arrays)

    async def call(self, arrays: list[np.ndarray], begun: Callable[[], object]) -> list[np.ndarray]:
        """Run a request as part of a batch and return its results.

        ``begun`` is called when the batch starts. A batch whose requests are all cancelled is cancelled too.
        """
        loop = asyncio.get_running_loop()
        member = _BatchMember(arrays, loop.create_future(), begun)
        key = tuple([a.shape[1:] for a in arrays])
        batch = self._open.get(key)
        if batch is not None and batch.rows + member.rows > self.most:
            self._start_batch(batch)
            batch = None
        if batch is None:
            batch = self._open[key] = _Batch(key)
            loop.call_later(self._delay, self._start_after_delay, batch)
        batch.members.append(member)
        batch.rows += member.rows
        if batch.rows >= self.most:
            self._start_batch(batch)
        try:
            return await member.future
        except asyncio.CancelledError:
            self._remove_member(batch, member)
            raise

    def _remove_member(self, batch: _Batch, member: _BatchMember) -> None:
        """Remove a cancelled request from its batch; the batch continues for the other requests."""
        if batch.task is None:
            batch.members.remove(member)
            batch.rows -= member.rows
        elif all(m.future.cancelled() or m is member for m in batch.members):
            batch.task.cancel()

    def _start_after_delay(self, batch: _Batch) -> None:
        """Start a batch whose first request has waited long enough, after the running batch."""
        if batch.task is None and not batch.due:
            batch.due = True
            self._waiting.append(batch)
            self._start_next_waiting_batch()

    def _start_next_waiting_batch(self) -> None:
        while self._waiting and not self._running:
            batch = self._waiting.popleft()
            if batch.task is None:
                self._start_batch(batch)

    def _start_batch(self, batch: _Batch) -> None:
        if self._open.get(batch.key) is batch:
            del self._open[batch.key]
        if batch.members:
            self._running += 1
            batch.task = asyncio.get_running_loop().create_task(self._run_batch(batch))
            self._tasks.add(batch.task)
            batch.task.add_done_callback(self._finish_batch_task)

    def _finish_batch_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._running -= 1
        self._start_next_waiting_batch()

    async def _run_batch(self, batch: _Batch) -> None:
        """Call the model for a batch and distribute the results; if the call fails, run its requests separately."""
        members = batch.members
        try:
            for member in members:
                member.begun()
            began = perf_counter()
            results = await self._call_model(members)
            self.observe(batch.rows, perf_counter() - began)
        except asyncio.CancelledError:
            _fail_batch_members(members, FenceCancelled("", "the batch was cancelled"))
            raise
        except Exception as error:
            if len(members) == 1 or not isinstance(error, CallError):
                _fail_batch_members(members, error)
            else:
                await self._run_members_separately(members)
            return
        at = 0
        for member in members:
            if not member.future.done():
                member.future.set_result([r[at : at + member.rows] for r in results])
            at += member.rows

    async def _run_members_separately(self, members: Sequence[_BatchMember]) -> None:
        """Run each request of a failed batch by itself, so that only the invalid request fails."""
        for member in members:
            if member.future.done():
                continue
            try:
                results = await self._call_model([member])
            except Exception as error:
                _fail_batch_members([member], error)
            else:
                if not member.future.done():
                    member.future.set_result(results)

    async def _call_model(self, members: Sequence[_BatchMember]) -> list[np.ndarray]:
        """Call the function with the arguments of all members, concatenated and padded to a size of ``sizes``."""
        rows = sum([m.rows for m in members])
        size = next((n for n in self._sizes if n >= rows), rows)
        arrays = [_concatenated_batch(parts, size - rows) for parts in zip(*[m.arrays for m in members])]
        results = await self._module.submit(self._function, *arrays, results=self._wanted)
        return [r[:rows] for r in results] if size > rows else results


def _concatenated_batch(parts: Sequence[np.ndarray], padding: int) -> np.ndarray:
    """Concatenate arrays along the first dim; the padding repeats the last row, which is valid input."""
    if padding:
        return np.concatenate([*parts, *([parts[-1][-1:]] * padding)])
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _fail_batch_members(members: Sequence[_BatchMember], error: BaseException) -> None:
    for member in members:
        if not member.future.done():
            member.future.set_exception(error)


def _ignore_batch_observation(rows: int, seconds: float) -> None:
    """Do nothing: the default for ``observe``."""


# ---------------------------------------------------------------- which functions can be batched


def batch_dim_symbol(arguments: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> str:
    """Return the symbol that is the first dim of all arguments and results and occurs in no other dim.

    Return "" if there is no such symbol.
    """
    rows = [*arguments, *results]
    firsts = {row["dims"][0] if row["dims"] else None for row in rows}
    symbol = firsts.pop() if len(firsts) == 1 and arguments else None
    if not isinstance(symbol, str) or not SYMBOL.match(symbol):
        return ""
    word = re.compile(rf"\b{re.escape(symbol)}\b")
    others = [d for row in rows for d in row["dims"][1:] if isinstance(d, str)]
    return "" if any(map(word.search, others)) else symbol


# Rows in the test whether a model can be batched: run together, they must give the results that each row gives alone.
# Three, so that there is a first, a last and one between.
PROBE_ROWS = 3
# Sizes tried for the symbolic dims other than the batch in that test, until the model accepts one.
PROBE_SIZES = (8, 16, 32, 1, 4)


def reason_rows_depend(
    module: LoadedModule, function: str, arguments: Sequence[dict[str, Any]], symbol: str, axes: Sequence[int] = ()
) -> str:
    """Test with random numbers if rows are independent; return the reason if they are not, else "".

    Rows computed together must equal rows computed alone, up to rounding. ``axes`` has the batch dim of each argument
    and of the result with the same number; an empty ``axes`` means the first dim.
    """
    axes = axes or [0] * len(arguments)
    symbols = sorted({d for row in arguments for d in row["dims"] if isinstance(d, str)} - {symbol})
    if not all(map(SYMBOL.match, symbols)):
        return "the sizes of other dims are expressions"
    error = ""
    for size in PROBE_SIZES if symbols else PROBE_SIZES[:1]:
        arrays = _random_arguments(arguments, dict.fromkeys(symbols, size) | {symbol: PROBE_ROWS})
        try:
            together = module.invoke(function, *arrays, results=NUMPY)
            singles = [[row_view(a, n, at) for a, at in zip(arrays, axes)] for n in range(PROBE_ROWS)]
            alone = [module.invoke(function, *one, results=NUMPY) for one in singles]
        except CallError as found:
            error = str(found).partition("\n")[0]
            continue
        places = [*axes, *[0] * len(together)]
        results = zip(together, zip(*alone), places)
        same = all(_are_results_close(x, np.concatenate(rows, at)) for x, rows, at in results)
        return "" if same else "results of a row depend on other rows"
    return f"a trial call with random values failed: {error}"


def row_view(array: np.ndarray, row: int, axis: int) -> np.ndarray:
    """Return one row of an array along ``axis``, as a view."""
    return array[(slice(None),) * axis + (slice(row, row + 1),)]


def _random_arguments(arguments: Sequence[dict[str, Any]], sizes: dict[str, int]) -> list[np.ndarray]:
    """Return random arguments: normally distributed floats, integers 0 and 1."""
    generator = np.random.default_rng(0)
    arrays = []
    for row in arguments:
        shape = [sizes[d] if isinstance(d, str) else d for d in row["dims"]]
        whole = DTYPES[row["dtype"]].kind in "biu"
        drawn = generator.integers(0, 2, shape) if whole else generator.normal(size=shape)
        arrays.append(np.asarray(drawn).astype(to_numpy(row["dtype"])))
    return arrays


# Tolerance relative to the largest absolute value of a result. Matmuls of several rows may round differently from those
# of one row; rows that are mixed differ by more. A few roundings of bf16, 2**-8 each.
PROBE_TOLERANCE = 2e-2


def _are_results_close(x: np.ndarray, y: np.ndarray) -> bool:
    """Return True if integers are equal and floats differ by at most the tolerance, relative to the largest."""
    if x.shape != y.shape:
        return False
    if x.dtype.kind in "biu":
        return bool((x == y).all())
    a, b = (v.astype(np.complex128 if v.dtype.kind == "c" else np.float64) for v in (x, y))
    finite = np.abs(b[np.isfinite(b)])
    room = PROBE_TOLERANCE * (finite.max() if finite.size else 0)
    return bool(np.isclose(a, b, 0, room, equal_nan=True).all())
