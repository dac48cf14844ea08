"""The ``--device`` option of commands that load bundles."""

from __future__ import annotations

from collections.abc import Sequence

PLACES_HELP = (
    "Device that runs the model, such as cpu or cuda:0; default: the first available. "
    "A model with several devices: d0=cpu:0 for each name."
)


def parse_places(texts: Sequence[str]) -> dict[str, str] | list[str] | str | None:
    """Parse the values of ``--device`` for ``aotc.load``: ``["d0=cpu:0"]`` to ``{"d0": "cpu:0"}``; None without values.

    Places without names apply to the devices of the model in order.

    Raises
    ------
    CallError
        If only some texts have names, or a name occurs twice.
    """
    from aotc.vmfb.errors import CallError

    pairs = [text.partition("=") for text in texts]
    named = {name: place for name, equals, place in pairs if equals}
    if named and (len(named) < len(pairs) or "" in named):
        expected = "one for each name, --device d0=cpu:0 --device d1=cuda:0, or places alone"
        raise CallError("", "cannot read --device", " ".join(texts)[:80], expected)
    return named or (texts[0] if len(texts) == 1 else list(texts) or None)
