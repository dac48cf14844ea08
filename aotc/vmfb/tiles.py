"""What a command of a command buffer waits for tile by tile: a contract between compiler and runtime, as ``abi`` is.

The words are described there. Plain classes, for the sake of a process that loads a bundle.
"""

from __future__ import annotations

from collections.abc import Sequence

FOLLOWERS, TILES, TILED_HEADER = range(3)  # of what stands after the dims of a command of a tiled graph
TILE_PRODUCER, TILE_TIMES, TILE_OVER, TILE_PLUS, TILE_WORDS = range(5)


class Tile:
    """What a command waits for item by item: before ``end`` those of ``producer`` before :meth:`need` of it.

    Attributes
    ----------
    producer : int
        The number of the command that makes it.
    times, over, plus : int
        A line: of each ``over`` items ``times`` of the producer, and ``plus / over`` more.
    """

    __slots__ = ("over", "plus", "producer", "times")

    def __init__(self, producer: int, times: int, over: int, plus: int) -> None:
        self.producer = producer
        self.times = times
        self.over = over
        self.plus = plus

    @property
    def words(self) -> list[int]:
        """Return its words in a command buffer."""
        return [self.producer, self.times, self.over, self.plus]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tile) and self.words == other.words

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Tile({', '.join(map(str, self.words))})"

    @property
    def halo(self) -> int:
        """Return how many items of the producer are done ahead of the line on which both end together."""
        return -(-self.plus // self.over)

    def need(self, end: int, items: int, of: int) -> int:
        """Return how many of the producer's ``of`` items are done before items before ``end``, of ``items``, run."""
        return of if end >= items else max(0, min(of, (end * self.times + self.plus) // self.over))


def tile_words(followers: Sequence[int], tiles: Sequence[Tile]) -> list[int]:
    """Return what stands after the dims of a command of a tiled graph."""
    return [len(followers), len(tiles), *followers, *(word for tile in tiles for word in tile.words)]
