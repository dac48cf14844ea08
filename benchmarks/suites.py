"""Topics and suites: a topic is a folder, a suite is a module in it with a function ``run``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from benchmarks import report, timing

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Topic:
    """A folder of suites.

    Attributes
    ----------
    about : str
        Description of one line for the listing.
    default : str
        The suite that runs if the command line only names the topic.
    """

    about: str
    default: str


TOPICS = {
    "models": Topic("Whole models next to other engines", "engines"),
    "ops": Topic("Single operations on CPUs next to XLA", "latency"),
    "gpu": Topic("Models, operations and transfers on an NVIDIA GPU", "models"),
    "serving": Topic("The server: overhead, batches, replaced bundles, memory", "overhead"),
    "compile": Topic("Compile time and the memory of the compiler", "ratios"),
    "runtime": Topic("Calls, submissions, the scheduler, process start", "calls"),
    "ranks": Topic("Sharded models of many ranks, by simulation", "simulated_steps"),
    "costs": Topic("The cost model and the thresholds of lowering", "cost_model"),
}


@cache
def suites(topic: str) -> dict[str, str]:
    """Return the suites of a topic with the first line of their docstrings, without importing them."""
    found = {}
    for path in sorted((FOLDER / topic).glob("*.py")):
        tree = ast.parse(path.read_text())
        if any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".")
    return found


def listing(topics: tuple[str, ...] = tuple(TOPICS)) -> Iterator[str]:
    """Yield the lines of the listing: each topic with its suites, at most 80 columns wide."""
    yield "Usage: python -m benchmarks TOPIC [SUITE] [OPTIONS]; --help: options of a suite"
    for topic in topics:
        yield f"\n{topic}: {TOPICS[topic].about}"
        for name, about in suites(topic).items():
            title = f"{name} (default)" if name == TOPICS[topic].default else name
            yield f"  {title:<21} {about}"[:80]


def parse(words: list[str]) -> tuple[str, str, list[str]]:
    """Return the topic, the suite and the options of a command line; exit with the listing if it has no known suite."""
    topic, rest = words[0], words[1:]
    if topic not in TOPICS:
        expected = ", ".join(TOPICS)
        raise SystemExit(f"unknown topic {topic!r}: found {topic!r}, expected one of {expected}")
    if not rest or rest[0].startswith("-"):
        return topic, TOPICS[topic].default, rest
    if rest[0] not in suites(topic):
        expected = ", ".join(suites(topic))
        raise SystemExit(f"unknown suite {rest[0]!r} of {topic}: expected one of {expected}")
    return topic, rest[0], rest[1:]


Smoke = Annotated[bool, typer.Option("--smoke", help="One repetition of the smallest case: does the suite work?")]
Format = Annotated[report.Format, typer.Option(help="Form of the tables.")]
Record = Annotated[str, typer.Option(metavar="NAME", help="Also write benchmarks/results/NAME.json.")]


def application(topic: str, name: str) -> typer.Typer:
    """Return the command line of a suite: its own options and those of all suites."""
    module = import_module(f"benchmarks.{topic}.{name}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, help=module.__doc__, context_settings={"terminal_width": 80})(_wrapped(module.run))
    return app


def _wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` with the options of all suites in its signature."""
    common = {"smoke": (Smoke, False), "format": (Format, report.Format.table), "record": (Record, "")}
    hints = get_type_hints(run, include_extras=True)

    @wraps(run)
    def command(**options: Any) -> None:
        smoke, form, record = (options.pop(name) for name in common)
        timing.SMOKE = smoke
        report.begin(form)
        status = run(**options)
        if record:
            report.write(record)
        raise typer.Exit(status or 0)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [p.replace(annotation=hints[p.name], kind=keyword) for p in inspect.signature(run).parameters.values()]
    parameters += [
        inspect.Parameter(n, keyword, default=default, annotation=hint) for n, (hint, default) in common.items()
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__  # type: ignore[attr-defined]  # typer would read the inner signature
    return command
