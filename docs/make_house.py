"""Write ``docs/house.md`` with its two pictures: the rooms of the house with the arrows between them, and a call's way.

The rooms are the folders, the arrows their imports: both are read from the sources, so the picture is of what is there.
Arrows that follow from others (a room imports one that imports the third) are left out.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parents[1]
Place = tuple[float, float, float, float]  # of a box: x, y, width, height
DOCS = ROOT / "docs"
WIDTH, MARGIN, GAP, LINE = 1240, 40, 60, 15
LANE_BEND = 14  # radius of the corners of arrows in the margins
LETTERS = 6.2  # pixels of a letter at the size of the files' names
COLOURS = ("#f4f1ea", "#e8eef4", "#eaf4ec", "#f4eaf0", "#f0f0e4", "#e9e9f4", "#f6ede4", "#e6f2f2")

# Folders that are shown as rooms of their own; every other folder's files are in the room around it.
ROOMS = (
    "cli", "aotc/tools", "aotc", "aotc/serve", "aotc/source", "aotc/frontend", "aotc/lowering", "aotc/lowering/passes",
    "aotc/lowering/regions", "aotc/lowering/program", "aotc/lowering/placement", "aotc/lowering/plans",
    "aotc/lowering/elements", "aotc/lowering/cost_model", "aotc/lowering/analysis", "aotc/kernels", "aotc/ir",
    "aotc/vmfb",
)  # fmt: skip
# What every room may ask, and no box of its own.
GROUND = (
    "aotc/diagnostics", "aotc/guard", "aotc/lowering/threshold", "aotc/options", "aotc/progress",
    "aotc/support/memoize", "aotc/support/recursion_limit",
    "aotc/targets",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Room:
    """A box of the picture: its name, what it is for, its files, and the rooms that it imports."""

    name: str
    purpose: str
    files: tuple[str, ...]
    imports: frozenset[str]


# The way of ``module(x)`` at run time: file, function, what happens there. A test looks each of them up.
FIRST_CALL = (
    ("aotc/vmfb/api/entry.py", "Entry.__call__", "the pytree of the arguments becomes a flat list"),
    ("aotc/vmfb/vm.py", "LoadedFunction.call", "chooses the way: sizes are static, symbolic, or read from data"),
    ("aotc/vmfb/vm.py", "LoadedFunction._plan_for_shapes", "looks for the plan of these shapes; there is none yet"),
    ("aotc/vmfb/vm.py", "interpret_program", "the host program runs once for these shapes; a recorder is its device"),
    (
        "aotc/vmfb/devices/cpu/device.py", "CpuExecutable.replay",
        "the plan becomes a function that is kept for these shapes",
    ),
)
LATER_CALLS = (
    ("aotc/vmfb/api/entry.py", "Entry.__call__", "the pytree of the arguments becomes a flat list"),
    ("aotc/vmfb/vm.py", "LoadedFunction._static_call", "dtypes, shapes; results are made (symbolic: _dynamic_call)"),
    ("aotc/vmfb/devices/cpu/device.py", "CpuExecutable.replay", "pointers of arguments, results, arena, constants"),
    ("aotc/kernels/cpu/executor/scheduler.py", "run_command_buffer",
     "a native call without the GIL: graphs, loops, branches"),
    ("aotc/kernels/cpu/executor/run_graph.py", "run_command_items",
     "a worker claims items of a kernel's grid and runs them"),
    ("aotc/kernels/cpu/compile.py", "compile_kernel", "what runs there: the kernel, compiled with the bundle"),
    ("aotc/vmfb/trees.py", "make_unflattener", "the flat results become the pytree of the results"),
)


# ---------------------------------------------------------------- reading the house


def room_of(path: str) -> str:
    """Return the room of a file or module path such as ``aotc/ir/dims``; the ground is none."""
    if path.removesuffix(".py") in GROUND:
        return ""
    fit = [room for room in ROOMS if path == room or path.startswith(room + "/")]
    return max(fit, key=len, default="")


def imported_paths(source: str) -> Iterable[str]:
    """Return the paths of the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            path = name.replace(".", "/").replace("aotc_cli", "cli")
            yield path if (ROOT / f"{path}.py").exists() else path.rpartition("/")[0]


def rooms() -> dict[str, Room]:
    """Return all rooms of the house as its sources have them."""
    files: dict[str, list[str]] = {room: [] for room in ROOMS}
    arrows: dict[str, set[str]] = {room: set() for room in ROOMS}
    for path in sorted([*(ROOT / "aotc").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        relative = path.relative_to(ROOT).as_posix()
        room = room_of(relative)
        if room and path.name != "__init__.py":
            files[room].append(relative.removeprefix(room + "/").removesuffix(".py"))
            arrows[room] |= {room_of(p) for p in imported_paths(path.read_text())} - {"", room}
    return {
        room: Room(room, _purpose(room), tuple(files[room]), frozenset(arrows[room])) for room in ROOMS if files[room]
    }


def _purpose(room: str) -> str:
    init = ROOT / room / "__init__.py"
    if room == "aotc":
        return "START HERE: pipeline.py shows the compiler in one file."
    return (ast.get_docstring(ast.parse(init.read_text())) or "").splitlines()[0].replace("``", "")


def floors(house: Mapping[str, Room]) -> list[list[Room]]:
    """Return the rooms floor by floor from the top: each is one floor below the lowest room that imports it."""
    depth: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in depth:
            depth[name] = 1 + max((of(above.name) for above in house.values() if name in above.imports), default=-1)
        return depth[name]

    for name in house:
        of(name)
    return [[house[n] for n in house if depth[n] == level] for level in sorted(set(depth.values()))]


def drawn_arrows(house: Mapping[str, Room]) -> list[tuple[str, str]]:
    """Return the imports that do not follow from others."""

    def reach(name: str) -> set[str]:
        return {name}.union(*(reach(below) for below in house[name].imports))

    return [
        (room.name, below)
        for room in house.values()
        for below in sorted(room.imports)
        if not any(below in reach(other) for other in room.imports - {below})
    ]


# ---------------------------------------------------------------- drawing


def text(x: float, y: float, words: str, size: int = 11, weight: str = "normal", anchor: str = "start") -> str:
    """Return an SVG line of text."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'font-family="Helvetica, Arial, sans-serif">{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    """Return an SVG rectangle."""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="6" fill="{colour}" '
        'stroke="#555"/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an SVG curve with a head."""
    middle = (y1 + y2) / 2
    return path(f"M {x1:.0f} {y1:.0f} C {x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}")


def path(course: str) -> str:
    """Return an SVG line with a head."""
    return f'<path d="{course}" fill="none" stroke="#444" stroke-width="1.2" marker-end="url(#head)"/>'


def sheet(height: float, parts: Iterable[str]) -> str:
    """Return a whole SVG picture."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#444"/></marker>'
    )
    background = f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">'
    return "\n".join([opening, f"<defs>{head}</defs>", background, *parts, "</svg>", ""])


def house_picture(house: Mapping[str, Room]) -> str:
    """Return the picture of the rooms, floor by floor, with the arrows between them."""
    parts: list[str] = []
    where: dict[str, Place] = {}
    y: float = MARGIN
    for floor in floors(house):
        shares = [6 + len(" ".join(room.files)) ** 0.5 for room in floor]
        room_left = WIDTH - 2 * MARGIN - GAP / 2 * (len(floor) - 1)
        widths = [room_left * share / sum(shares) for share in shares]
        lines = [_file_lines(r.files, int((w - 20) / LETTERS)) for r, w in zip(floor, widths)]
        purposes = [wrap(r.purpose, int((w - 20) / LETTERS)) for r, w in zip(floor, widths)]
        height = 30 + LINE * max(len(a) + len(b) for a, b in zip(lines, purposes)) + 10
        x: float = MARGIN
        for room, width, files, purpose in zip(floor, widths, lines, purposes):
            where[room.name] = (x, y, width, height)
            parts += [box(x, y, width, height, COLOURS[len(where) % len(COLOURS)])]
            parts += [text(x + 10, y + 19, room.name, 14, "bold")]
            parts += [text(x + 10, y + 36 + LINE * n, line) for n, line in enumerate(purpose)]
            below = y + 36 + LINE * len(purpose)
            parts += [text(x + 10, below + 4 + LINE * n, line, 10) for n, line in enumerate(files)]
            x += width + GAP / 2
        y += height + GAP
    return sheet(y - GAP + MARGIN, [*_arrows(house, where), *parts])


def _arrows(house: Mapping[str, Room], where: Mapping[str, Place]) -> list[str]:
    """Return the arrows between boxes at these places; those over several floors run along the nearer side."""
    arrows = sorted(drawn_arrows(house), key=lambda pair: where[pair[1]][0] + where[pair[1]][2] / 2)
    long = [pair for pair in arrows if where[pair[1]][1] - sum(where[pair[0]][1::2]) > GAP + 1]
    short = [pair for pair in arrows if pair not in long]
    by_source = sorted(short, key=lambda pair: where[pair[0]][0])
    parts = [_lane(where[above], where[below]) for above, below in long]
    for above, below in short:
        ax, ay, aw, ah = where[above]
        bx, by, bw, _ = where[below]
        out = [pair for pair in short if pair[0] == above]
        into = [pair for pair in by_source if pair[1] == below]
        x1 = ax + aw * (out.index((above, below)) + 1) / (len(out) + 1)
        x2 = bx + bw * (into.index((above, below)) + 1) / (len(into) + 1)
        parts.append(arrow(x1, ay + ah, x2, by - 1))
    return parts


def _lane(above: Place, below: Place) -> str:
    """Return an arrow from the outer side of a box, down the margin, into the same side of a lower one."""
    ax, ay, aw, ah = above
    bx, by, bw, bh = below
    left = ax + aw / 2 < WIDTH / 2
    lane = MARGIN / 2 if left else WIDTH - MARGIN / 2
    x1, x2 = (ax, bx - 1) if left else (ax + aw, bx + bw + 1)
    y1, y2 = ay + ah / 2, by + bh / 2
    bend = LANE_BEND if left else -LANE_BEND
    return path(
        f"M {x1:.0f} {y1:.0f} L {lane + bend:.0f} {y1:.0f} Q {lane:.0f} {y1:.0f} {lane:.0f} {y1 + LANE_BEND:.0f} "
        f"L {lane:.0f} {y2 - LANE_BEND:.0f} Q {lane:.0f} {y2:.0f} {lane + bend:.0f} {y2:.0f} L {x2:.0f} {y2:.0f}"
    )


def _file_lines(files: Iterable[str], letters: int) -> list[str]:
    """Return the names of files in lines of so many letters; each folder inside the room begins a line."""
    folders: dict[str, list[str]] = {}
    for file in files:
        folder, _, name = file.rpartition("/")
        folders.setdefault(folder, []).append(name)
    return [
        line
        for folder in sorted(folders)
        for line in wrap(f"{folder}/: " * bool(folder) + ", ".join(folders[folder]), letters, subsequent_indent="    ")
    ]


def call_picture() -> str:
    """Return the picture of a call: the first one of some shapes on the left, later ones on the right."""
    parts: list[str] = []
    bottom = 0.0
    half = WIDTH / 2 - 1.5 * MARGIN
    for x, title, steps in (
        (MARGIN, "The first call with some shapes", FIRST_CALL),
        (WIDTH / 2 + MARGIN / 2, "Every later call with these shapes", LATER_CALLS),
    ):
        parts.append(text(x, 26, title, 15, "bold"))
        for n, (file, function, what) in enumerate(steps):
            y = 44 + n * 84
            parts.append(box(x, y, half, 58, COLOURS[(file.count("/") + len(file)) % len(COLOURS)]))
            parts.append(text(x + 12, y + 22, function, 13, "bold"))
            parts.append(text(x + half - 12, y + 22, file, 11, "normal", "end"))
            parts.append(text(x + 12, y + 44, what, 12))
            if n:
                parts.append(arrow(x + half / 2, y - 26, x + half / 2, y - 2))
            bottom = max(bottom, y + 58)
    end = 44 + len(FIRST_CALL) * 84
    parts.append(text(MARGIN + 12, end + 12, "then as on the right, with that function", 12))
    return sheet(bottom + MARGIN, parts)


# ---------------------------------------------------------------- the page

PAGE = """\
# The house

Both pictures and the table are written by `python docs/make_house.py` from the sources; a test fails when they are out
of date. An arrow is an import; arrows that follow from others are left out. What each room may import is the table of
`tests/house/test_layering.py`.

![rooms and imports](house.svg)

Every room may also ask {ground}.

| To find | Look in |
|---|---|
{rows}

## A call's way

![a call at run time](call.svg)

Arguments that are not yet arrays of the signature's dtypes are converted first (`LoadedFunction.run`). A program that
reads a size from its data has no plan: it is interpreted in every call (`LoadedFunction._interpret`), and submits one
command buffer before the size is known and one after it.
"""

FIND = (
    ("a tensor pass", "`aotc/lowering/passes/`, a file per pass, named as its row in `aotc/pipeline.py`"),
    ("a fact about programs that several parts ask for", "`aotc/lowering/analysis/`"),
    (
        "a threshold, the size of a block, a price",
        "a row above its only reader (`aotc/lowering/threshold.py`); in `thresholds.py` or `limits.py` of the folder "
        "if several read it; cases: `tests/support/cost_cases.py`",
    ),
    ("a region's lowering to loops", "`aotc/lowering/regions/<kind>/`, `cpu*.py` and `gpu*.py`"),
    ("memory, schedule, the host program", "`aotc/lowering/program/`"),
    ("what an op means, its type rule, its facts", "`aotc/ir/opset/<family>.py`"),
    (
        "an IR, its text, verifier and interpreter",
        "`aotc/ir/tensor/` and `semantics/`, `aotc/ir/loop/`, `aotc/ir/program/`",
    ),
    ("an importer", "`aotc/frontend/importers/<family>.py`; custom calls by name in `aotc/frontend/calls/`"),
    ("how an op becomes LLVM IR", "`aotc/kernels/emit/`; formulas of functions in `aotc/kernels/formulas/`"),
    (
        "a template for GPUs, a PTX instruction and what it means",
        "`aotc/kernels/cuda/templates/`; `ptx.py`, `ampere.py`, `hopper.py`, `block.py` beside it",
    ),
    (
        "a kernel as a Python function for Numba, and what it imports",
        "`aotc/kernels/numba_front/`, `aotc/kernels/runtime/`",
    ),
    ("register tiles, the executor, linking", "`aotc/kernels/cpu/`"),
    ("the file format, the VM, devices", "`aotc/vmfb/`, `aotc/vmfb/devices/`"),
    ("a command of `aotc`", "`cli/commands/<command>.py`"),
)


def page() -> str:
    """Return the text of ``docs/house.md``."""
    rows = "\n".join(f"| {what} | {where} |" for what, where in FIND)
    return PAGE.format(ground=", ".join(f"`{name}.py`" for name in GROUND), rows=rows)


def documents() -> dict[Path, str]:
    """Return all files that this script writes, with their contents."""
    return {DOCS / "house.md": page(), DOCS / "house.svg": house_picture(rooms()), DOCS / "call.svg": call_picture()}


def main() -> int:
    """Write the page and its pictures."""
    for path, contents in documents().items():
        path.write_text(contents)
    return 0


if __name__ == "__main__":
    sys.exit(main())
