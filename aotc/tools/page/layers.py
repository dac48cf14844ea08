"""Layers of a model as its user names them: name scopes as a tree, with blocks where names are flat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

Names = tuple[str, ...]
"""Names of layers around an op or a command, the outermost first."""

_NUMBERED = re.compile(r"[A-Za-z]*\d+[a-z]?")
_RANK = re.compile(r".*\d[dD]")  # conv2d: its number does not count layers


def layer_paths(scopes: Iterable[str]) -> dict[str, Names]:
    """Return the names of the layers around each scope, the outermost first.

    These are the scope's own names. Where a framework has flat names, as Keras has, names that share a numbered prefix
    are in a block of that name: ``conv2_block1_1_conv`` is in ``conv2_block1``, which is in ``conv2``.
    """
    all_parts = {scope: _names_of(scope) for scope in scopes}
    siblings: dict[Names, dict[str, None]] = {}
    for parts in all_parts.values():
        for depth, name in enumerate(parts):
            siblings.setdefault(parts[:depth], {})[name] = None
    blocks = {parent: block_names(list(names)) for parent, names in siblings.items()}
    return {
        scope: tuple(name for n, part in enumerate(parts) for name in (*blocks[parts[:n]][part], part))
        for scope, parts in all_parts.items()
    }


def _names_of(scope: str) -> Names:
    return tuple(filter(None, scope.split("/")))


def block_names(names: Sequence[str]) -> dict[str, Names]:
    """Return the names of the blocks around each of the layers ``names``, the outermost first.

    A block has two layers or more, and fewer than the block around it. The first block of a series may have no number:
    ``expanded_conv_project`` is in ``expanded_conv`` if there is a block ``expanded_conv_1``.
    """
    found = {name: _numbered_prefixes(name) for name in names}
    series = {block.rpartition("_")[0] for blocks in found.values() for block in blocks if re.search(r"_\d+$", block)}
    for name, blocks in found.items():
        first = next((s for s in sorted(series, key=len, reverse=True) if s and name.startswith(f"{s}_")), "")
        if not blocks and first and not name.removeprefix(f"{first}_")[0].isdigit():
            blocks.append(first)
    members: dict[str, set[str]] = {}
    for name, blocks in found.items():
        for block in blocks:
            members.setdefault(block, set()).add(name)
    return {name: _distinct(blocks, members) for name, blocks in found.items()}


def _numbered_prefixes(name: str) -> list[str]:
    """Return the prefixes of a name that end with a number and precede a word, the shortest first.

    Of two numbers that follow each other, as in ``block1_1_conv``, the first one counts.
    """
    parts = name.split("_")
    numbered = [bool(_NUMBERED.fullmatch(part)) and not _RANK.fullmatch(part) for part in parts]
    numbered[0] = numbered[0] and not parts[0].isdigit()
    words = [part[:1].isalpha() for part in parts]
    return [
        "_".join(parts[: n + 1])
        for n in range(len(parts))
        if numbered[n] and any(words[n + 1 :]) and not (n and parts[n].isdigit() and numbered[n - 1])
    ]


def _distinct(blocks: Sequence[str], members: dict[str, set[str]]) -> Names:
    """Return the blocks with two members or more, without those that have the same members as the one before."""
    found: list[str] = []
    for block in blocks:
        if len(members[block]) > 1 and not (found and members[block] == members[found[-1]]):
            found.append(block)
    return tuple(found)


# ---------------------------------------------------------------- layers that share a scope


def repeated_layers(trace: Iterable[tuple[str, str]]) -> dict[Names, int]:
    """Return how often each layer with layers inside runs, where one scope stands for several runs.

    Scopes of ``flax.nnx`` are names of classes: four blocks of a class have one scope. The ops of such a scope, in the
    order of the trace, are the same sequence several times.

    Parameters
    ----------
    trace : iterable of (str, str)
        The scope and the name of each op, in the order of the trace.
    """
    ops: dict[Names, list[tuple[Names, str]]] = {}
    for scope, op in trace:
        names = _names_of(scope)
        for depth in range(1, len(names) + 1):
            ops.setdefault(names[:depth], []).append((names[depth:], op))
    found = {}
    for layer, rows in ops.items():
        if len({names[:1] for names, _ in rows}) > 1 and (count := len(rows) // _period(rows)) > 1:
            found[layer] = count
    return found


def _period(rows: Sequence[tuple[Names, str]]) -> int:
    """Return the length of the shortest sequence that ``rows`` repeats without a rest."""
    sizes = (size for size in range(1, len(rows)) if len(rows) % size == 0)
    return next((size for size in sizes if rows[size:] == rows[:-size]), len(rows))


def numbered_scopes(commands: Sequence[tuple[str, str]], repeats: Mapping[Names, int]) -> list[str]:
    """Return the scope of each command, with numbers where one scope stands for several layers: ``Net/Block #2``.

    Commands of one location belong to the layers in order, if the layers have equally many of them. Another command
    belongs to the layer of the command after it.

    Parameters
    ----------
    commands : sequence of (str, str)
        The scope and the location of each command, in the order of the call.
    repeats : mapping
        The result of :func:`repeated_layers`.
    """
    names = [list(_names_of(scope)) for scope, _ in commands]

    def number(some: list[int], outer: Names, runs: int) -> None:
        """Number the layers inside ``outer``, of which ``some`` are the commands of one of ``runs`` runs."""
        inner: dict[Names, list[int]] = {}
        for n in some:
            own = _names_of(commands[n][0])
            if len(own) > len(outer):
                inner.setdefault(own[: len(outer) + 1], []).append(n)
        for layer, members in inner.items():
            all_runs = repeats.get(layer, runs)
            if all_runs <= runs or all_runs % runs:
                number(members, layer, runs)
                continue
            places = _places_in_order([commands[n][1] for n in members], all_runs // runs)
            for place in range(all_runs // runs):
                here = [n for n, p in zip(members, places) if p == place]
                for n in here:
                    names[n][len(outer)] += f" #{place + 1}"
                number(here, layer, all_runs)

    number(list(range(len(commands))), (), 1)
    return ["/".join(row) for row in names]


def _places_in_order(locs: Sequence[str], count: int) -> list[int]:
    """Return for each command of ``count`` equal layers the layer that it belongs to."""
    by_loc: dict[str, list[int]] = {}
    for n, loc in enumerate(locs):
        by_loc.setdefault(loc, []).append(n)
    places: list[int | None] = [None] * len(locs)
    for members in by_loc.values():
        if len(members) % count == 0:
            for order, n in enumerate(members):
                places[n] = order * count // len(members)
    after = count - 1
    found = []
    for place in reversed(places):
        after = after if place is None else place
        found.append(after)
    return found[::-1]
