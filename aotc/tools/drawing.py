"""SVG charts of boxes over a horizontal axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from math import floor, log10

WIDTH, ROW, MARGIN, HEAD, FOOT = 1000, 22, 20, 34, 30  # pixels
LETTER = 7  # pixels: width of a character of a label
TICKS = 10  # maximum number of ticks on the axis
_ROUND = (1, 2, 5, 10)

_STYLE = """text { font: 12px sans-serif; fill: #222 } .title { font-size: 15px } .axis { font-size: 11px; fill: #555 }
.box { fill: #e8eef4; stroke: #7a93ac } .critical { fill: #f4d9d2; stroke: #b3442e } .rule { stroke: #ddd }
.peak { stroke: #b3442e; stroke-dasharray: 4 3 }"""


@dataclass
class Drawing:
    """A chart under construction: boxes over a horizontal axis from 0 to ``end``, in rows from top to bottom.

    Positions are in the caller's scale: ``scale`` of them are one ``unit`` of the axis labels. Ticks are at least
    ``least`` units apart. ``row`` is the height in pixels of one vertical unit, for example a lane or a byte.
    """

    title: str
    end: float
    unit: str
    scale: float = 1.0
    row: float = ROW
    least: float = 0.0
    parts: list[str] = field(default_factory=list)
    bottom: float = 0.0

    def x(self, at: float) -> float:
        """Return the horizontal pixel of a position on the axis."""
        return MARGIN + (at / self.end if self.end else 0.0) * WIDTH

    def box(self, begin: float, end: float, top: float, bottom: float, kind: str, label: str, tooltip: str) -> None:
        """Draw a box with a ``tooltip``, and with ``label`` if the box is large enough."""
        left, width = self.x(begin), max(self.x(end) - self.x(begin), 1.0)
        y, height = HEAD + MARGIN + top * self.row, max((bottom - top) * self.row - 1, 1.0)
        place = f'x="{left:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect {place} class="{kind}"><title>{escape(tooltip)}</title></rect>')
        if len(label) * LETTER < width and height > LETTER:
            self.parts.append(f'<text x="{left + 4:.1f}" y="{y + height / 2 + 4:.1f}">{escape(label)}</text>')
        self.bottom = max(self.bottom, y + height)

    def line(self, at: float, kind: str) -> None:
        """Draw a vertical line over the whole height."""
        end, x = self.bottom or HEAD + MARGIN, f"{self.x(at):.1f}"
        self.parts.append(f'<line x1="{x}" y1="{HEAD}" x2="{x}" y2="{end:.1f}" class="{kind}"/>')

    def _step(self) -> float:
        """Return the distance between ticks: a round number of units."""
        least = self.end / self.scale / TICKS
        if least <= self.least:
            return max(self.least, 1.0) * self.scale
        power = 10.0 ** floor(log10(least))
        return next(n * power for n in _ROUND if n * power >= least * (1 - 1e-9)) * self.scale

    def text(self) -> str:
        """Return the chart as SVG."""
        bottom = max(self.bottom, HEAD + MARGIN)
        head = f'<text x="{MARGIN}" y="{MARGIN + 4}" class="title">{escape(self.title)}</text>'
        axis = []
        step = self._step()
        last = int(self.end / step + 1e-9)
        for n in range(last + 1):
            x = self.x(n * step)
            axis.append(f'<line x1="{x:.1f}" y1="{HEAD}" x2="{x:.1f}" y2="{bottom + 6:.1f}" class="rule"/>')
            tick = f"{n * step / self.scale:g}{' ' + self.unit if n == last else ''}"
            axis.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle" class="axis">{tick}</text>')
        width, height = WIDTH + 4 * MARGIN, bottom + FOOT
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:.0f}" '
        svg += f'viewBox="0 0 {width} {height:.0f}">'
        return "\n".join([svg, f"<style>{_STYLE}</style>", head, *axis, *self.parts, "</svg>", ""])
