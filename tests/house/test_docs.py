"""Documents are true: the tour is what the compiler prints, and every file and option they name exists."""

import ast
import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from fuzz.run import KINDS

pytestmark = pytest.mark.ir

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / n for n in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *(ROOT / "docs").rglob("*.md")])


def _as_made(pages, script, update):
    """Check that pages are what ``script`` makes; with ``--update`` they become it."""
    for path, text in pages.items():
        if update:
            path.write_text(text)
        assert path.read_text() == text, f"run python docs/{script}"


def _made_by(script):
    return runpy.run_path(str(ROOT / "docs" / script))


def test_the_tour_page_is_up_to_date(update):
    _as_made({ROOT / "docs" / "tour.md": _made_by("make_tour.py")["tour"]()}, "make_tour.py", update)


def test_the_architecture_page_is_up_to_date(update):
    _as_made(_made_by("make_house.py")["documents"](), "make_house.py", update)


def test_the_api_page_is_up_to_date(update):
    text = _made_by("make_api.py")["page"]()
    _as_made({ROOT / "docs" / "api.md": text}, "make_api.py", update)
    for name in ("compile(model", "LoadedModule.invoke(", "ModuleState.update_weights(", "await Entry.async_("):
        assert name in text


def test_the_supported_ops_page_is_up_to_date(update):
    _as_made({ROOT / "docs" / "supported_ops.md": _made_by("make_ops.py")["page"]()}, "make_ops.py", update)


def test_the_command_line_page_is_up_to_date(update):
    _as_made({ROOT / "docs" / "cli.md": _made_by("make_cli.py")["page"]()}, "make_cli.py", update)


def test_every_environment_variable_is_on_its_page():
    sources = (path for folder in ("aotc", "cli") for path in (ROOT / folder).rglob("*.py"))
    names = {name for path in sources for name in re.findall(r"\bAOTC_[A-Z_]+\b", path.read_text())}
    page = set(re.findall(r"^\| `(AOTC_[A-Z_]+)`", (ROOT / "docs/environment.md").read_text(), re.MULTILINE))
    assert page == names


def test_the_zoo_page_is_up_to_date(update):
    text = runpy.run_path(str(ROOT / "docs" / "make_zoo.py"))["page"]()
    path = ROOT / "docs" / "zoo.md"
    if update:
        path.write_text(text)
    assert path.read_text() == text, "run python docs/make_zoo.py"


def test_the_picture_of_a_call_names_existing_functions():
    house = _made_by("make_house.py")
    for file, name, _ in (*house["FIRST_CALL"], *house["LATER_CALLS"]):
        scope = ast.parse((ROOT / file).read_text()).body
        for part in name.split("."):
            inner = [n for n in scope if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
            assert inner, f"{file} has no {name}"
            scope = inner[0].body


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_exist(page):
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    paths = re.findall(r"`((?:aotc|cli|tests|docs|benchmarks|examples)/[\w./]+)`", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    written = re.findall(r"^(?:Write|Copy `.+` to) `([\w./]+)`", text, re.MULTILINE)  # by who follows the page
    missing += [path for path in paths if not (ROOT / path).exists() and path not in written]
    short = re.findall(r"`((?:ir|opset|frontend|lowering|kernels|vmfb)/[\w./]+)`", text)  # tables leave out aotc
    missing += [path for path in short if not any((ROOT / top / path).exists() for top in ("aotc", "aotc/ir"))]
    assert not missing


PLAIN = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
PLAIN += [ROOT / "docs" / f"{name}.md" for name in ("index", "inputs", "weights", "state", "async_calls", "errors")]
PLAIN += [ROOT / "docs" / f"{name}.md" for name in ("environment", "limits", "status", "supported_ops")]
PLAIN += [ROOT / "docs" / f"{name}.md" for name in ("deploy", "memory", "reliability", "security", "serve")]
PLAIN += [ROOT / "docs" / f"{name}.md" for name in ("custom_calls", "debugging", "tools", "devices")]
PLAIN += sorted([*(ROOT / "docs/get_started").glob("*.md"), *(ROOT / "docs/tutorials").glob("*.md")])
"""Pages in plain English; the list only grows."""
LONGEST_SENTENCE = 35  # words


def _sentences(text):
    """Yield the sentences of a page: of paragraphs, items of lists and cells of tables, without code and links."""
    text = re.sub(r"^ *```.*?^ *```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", text)
    for block in re.split(r"\n\s*\n|\n(?=[-#|>]|\s*[-*] |\d+\. )", text):
        for part in block.split("|") if block.lstrip().startswith("|") else [block]:
            yield from re.split(r"(?<=[.!?:;])\s+", part)


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.name)
def test_sentences_of_pages_are_short(page):
    words = {" ".join(s.split()): len(re.findall(r"[A-Za-z][\w'-]*", s)) for s in _sentences(page.read_text())}
    assert {sentence: count for sentence, count in words.items() if count > LONGEST_SENTENCE} == {}


def _benchmark_options():
    """Return the options of all suites: the parameters of their ``run``, and those that all suites have."""
    names = {"--smoke", "--format", "--record"}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name == "run":
                names |= {"--" + a.arg.replace("_", "-") for a in node.args.args}
    return names


@cache
def _known_options():
    others = (ROOT / "tests/conftest.py", ROOT / "tests/fuzz/run.py", *(ROOT / "benchmarks").rglob("*.py"))
    source = "".join(path.read_text() for path in (*(ROOT / "cli").rglob("*.py"), *others))
    known = {*re.findall(r'"(--[a-z][\w-]*)"', source), *(f"--{kind}" for kind in KINDS), *_benchmark_options()}
    names = re.findall(r"^    (\w+): .* = typer\.Option", source, re.MULTILINE)
    return known | {"--" + name.replace("_", "-") for name in names}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_on_pages_exist(page):
    known = _known_options()
    named = set(re.findall(r"`[^`\n]*?(--[a-z][\w-]*)", text := page.read_text()))
    named |= set(re.findall(r"^ *aotc .*?(--[a-z][\w-]*)", text, re.MULTILINE))
    assert not {name for name in named if name not in known and name.replace("--no-", "--") not in known}
