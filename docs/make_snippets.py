"""Run the snippets of the guides, and write their output below each: ``python docs/make_snippets.py [PAGE...]``.

The ``python`` and ``bash`` blocks of a page run in order, in one new process and one empty folder. A ``text`` block
that follows a snippet is its output; with a title, its numbers may be any. Other blocks (``console``), and blocks in
tabs, do not run. Ports of servers (``--port=8741``, ``localhost:8741``) are replaced by free ones while they run, so
that several pages can run at a time on one machine; the output names the ports of the page again.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
GUIDES = (
    "inputs", "weights", "sharding", "state", "async_calls", "errors", "memory", "security", "serve", "custom_calls",
    "debugging", "tools", "tuning", "devices",
)  # fmt: skip
PAGES = [DOCS.parent / "README.md", DOCS / "index.md", *(DOCS / f"{guide}.md" for guide in GUIDES)]
PAGES += [path for folder in ("get_started", "tutorials") for path in sorted((DOCS / folder).glob("*.md"))]
SECONDS = 300  # of a page; the slowest needs less than 30 on two cores
SNIPPET = re.compile(
    r"^```(python|bash)\n(.*?)^```\n" r"(?:\n```text( title=\"[^\"\n]*\")?\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
PORT = re.compile(r"(--(?:grpc-)?port[= ]|\b(?:localhost|127\.0\.0\.1):)(\d{4,5})\b")
VARYING = [
    (re.compile(r"\s+"), " "),  # first: where a line is folded depends on the name of the CPU
    (re.compile(r"\b\d[\d,.]*(?:e[+-]?\d+)? ?(?:ns|us|ms|s|B|kB|MB|GB|bytes|GFLOP/s|GB/s|%|x)(?!\w)"), "N"),
    (re.compile(r"\b\d+(?:\.\d+)?e-\d+"), "E"),  # errors of rounding
    (re.compile(r"\b[0-9a-f]{16,}\b"), "H"),
    (re.compile(r"(?<=id=)\d+"), "N"),
    (re.compile(r"\bcpu:(?:x86-64|aarch64)[\w-]*"), "cpu"),
    (re.compile(r"[-─]{3,}"), "---"),  # widths of columns
]


class Snippet(NamedTuple):
    """A block that runs, the output that the page shows, and the place of both in the page."""

    language: str
    code: str
    title: str
    output: str
    start: int
    end: int


def needs(text: str) -> list[str]:
    """Return the packages without which a page cannot run: ``<!-- needs: torch -->``."""
    line = re.match(r"<!-- needs: (.*) -->", text)
    return line.group(1).split(", ") if line else []


def page(path: Path) -> str:
    """Return the text of a page with the output of its snippets."""
    text = path.read_text()
    snippets = [Snippet(m[1], m[2], m[3] or "", m[4] or "", m.start(), m.end()) for m in SNIPPET.finditer(text)]
    parts, last = [], 0
    for snippet, printed in zip(snippets, _run(snippets) if snippets else [], strict=True):
        output = snippet.output if same(snippet.output, printed, bool(snippet.title)) else printed
        parts.append(text[last : snippet.start] + f"```{snippet.language}\n{snippet.code}```\n")
        if output:
            parts.append(f"\n```text{snippet.title}\n{output}```\n")
        last = snippet.end
    return "".join([*parts, text[last:]])


def same(expected: str, printed: str, any_numbers: bool = False) -> bool:
    """Return True if two outputs differ at most in times, sizes, digests, rounding errors and names of CPUs."""
    return _masked(expected, any_numbers) == _masked(printed, any_numbers)


def _masked(text: str, any_numbers: bool) -> str:
    for pattern, name in VARYING:
        text = pattern.sub(name, text)
    return re.sub(r"[\d.,]+(?: [num]?s\b)?", "N", text).strip() if any_numbers else text.strip()


def _run(snippets: list[Snippet]) -> list[str]:
    """Return the output of each snippet of a page."""
    free = _free_ports(dict.fromkeys(m[2] for s in snippets for m in PORT.finditer(s.code)))
    codes = [(s.language, with_ports(s.code, free)) for s in snippets]
    with tempfile.TemporaryDirectory() as folder:
        work, commands = Path(folder, "work"), Path(folder, "bin")
        work.mkdir()
        commands.mkdir()
        _link_commands(commands)
        path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "PATH": path, "COLUMNS": "80", "NO_COLOR": "1", "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-X", "utf8", __file__, "--child", str(Path(folder, "out.json"))]
        child = subprocess.Popen(
            command, cwd=work, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            _, errors = child.communicate(json.dumps(codes), timeout=SECONDS)
        finally:
            with suppress(ProcessLookupError):  # servers that a snippet started
                os.killpg(child.pid, signal.SIGKILL)
        if child.returncode:
            raise RuntimeError(f"a snippet failed:\n{errors}")
        pages = {port: name for name, port in free.items()}
        printed = json.loads(Path(folder, "out.json").read_text())
        return [with_ports(text.replace(f"{work}/", ""), pages) for text in printed]


def with_ports(text: str, ports: Mapping[str, str]) -> str:
    """Return a text with the ports of its addresses and options replaced."""
    return PORT.sub(lambda m: m[1] + ports.get(m[2], m[2]), text)


def _free_ports(names: Iterable[str]) -> dict[str, str]:
    """Return a different free port of this machine for each of ``names``."""
    with ExitStack() as stack:
        sockets = {name: stack.enter_context(socket.socket()) for name in names}
        for one in sockets.values():
            one.bind(("127.0.0.1", 0))
        return {name: str(one.getsockname()[1]) for name, one in sockets.items()}


def _link_commands(folder: Path) -> None:
    """Write the commands of the guides: ``aotc`` and ``python`` of this interpreter, whatever is installed."""
    aotc = "import sys; sys.argv[0] = 'aotc'; from aotc_cli.start import main; main()"
    for name, arguments in {"aotc": f'-c "{aotc}"', "python": ""}.items():
        file = folder / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        file.chmod(0o755)


def _outputs(snippets: list[tuple[str, str]]) -> Iterator[str]:
    """Run each snippet in this process and this folder, and yield what it prints; those of Python are one file."""
    scope: dict[str, object] = {"__name__": "__main__"}
    file = Path("example.py").absolute()  # JAX reads the lines of functions
    file.touch()
    for language, code in snippets:
        if language == "bash":
            done = subprocess.run(
                ["bash", "-ec", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{code}\n{done.stdout}")
            yield done.stdout
            continue
        before = file.read_text()
        file.write_text(before + code)
        linecache.checkcache(str(file))
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile("\n" * before.count("\n") + code, str(file), "exec"), scope)
        yield printed.getvalue()


def main(arguments: list[str]) -> None:
    """Write the pages named, or all that can run here."""
    if arguments[:1] == ["--child"]:
        results = [text and text.rstrip("\n") + "\n" for text in _outputs(json.load(sys.stdin))]
        Path(arguments[1]).write_text(json.dumps(results))
        return
    for path in [Path(a).resolve() for a in arguments] or PAGES:
        print(path)
        path.write_text(page(path))


if __name__ == "__main__":
    main(sys.argv[1:])
