"""The help of commands: groups of options, metavars, examples with captions; versions and shell completion."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from aotc import __version__
from aotc_cli.main import app
from aotc_cli.shared.compile_options import complete_targets
from aotc_cli.shared.option_groups import Panel

ROOT = Path(__file__).parents[2]
COMMANDS = tuple(get_command(app).commands)


def help_of(*words):
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


def titles_of(text):
    """The headings of the groups of a help text."""
    return re.findall(r"^([A-Z][a-z A-Z]+):$", text, re.MULTILINE)


def test_options_of_compile_are_in_groups():
    text = help_of("compile")
    expected = [Panel.TARGET, Panel.NUMBERS, Panel.DYNAMIC, Panel.WEIGHTS, Panel.DEVICES, Panel.LIMITS, Panel.DEBUG]
    assert titles_of(text) == ["Arguments", "Options", *expected, "Examples"]
    numbers = text[text.index("\nNumbers:") : text.index("\nDynamic shapes:")]
    assert "--matmul-precision model|bf16|bf16x3|highest" in numbers
    assert "--specialize DIM=SIZE,..." in text


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_in_groups_with_metavars_and_fit_80_columns(name):
    text = help_of(name)
    options = text[: text.index("\nExamples:")]
    groups = [title for title in titles_of(options) if title not in ("Arguments", "Options")]
    order = [group.value for group in Panel]
    assert groups == sorted(groups, key=order.index)
    plain = re.search(r"\nOptions:\n(.*?)(\n\n|$)", options, re.DOTALL)[1]
    assert len(re.findall(r"^  -", plain, re.MULTILINE)) <= 9
    assert not re.search(r"<(str|int|float|path|text|choice)|{", options)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_each_example_has_a_caption(name):
    lines = help_of(name).partition("\nExamples:\n")[2].strip("\n").splitlines()
    captioned = continued = False
    for line in filter(str.strip, lines):
        if line.startswith("    "):
            assert captioned, line
            assert continued or line.strip().startswith("aotc "), line
            continued = line.endswith("\\")
        else:
            captioned = line.endswith(":")
            assert captioned, line
            assert line.strip()[0].isupper(), line


def test_messages_and_help_name_no_file_that_pip_does_not_install():
    paths = [*(ROOT / "aotc").rglob("*.py"), *(ROOT / "cli").rglob("*.py")]
    for path in (p for p in paths if re.search(r"docs/\w+\.md", p.read_text())):
        tree = ast.parse(path.read_text())
        texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
        calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Estimate")
        texts |= {id(n) for call in calls for n in call.args}  # sources of numbers
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                assert not re.search(r"docs/\w+\.md", node.value), f"{path}:{node.lineno}"
    for name in get_command(app).commands:
        assert "docs/" not in help_of(name)


def test_a_long_example_continues_on_the_next_line():
    text = help_of("serve")
    assert "--tls-cert=cert.pem \\\n      --tls-key=key.pem\n" in text


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_version_option_prints_the_version(flag):
    assert CliRunner().invoke(app, [flag]).output == f"aotc {__version__}\n"


@pytest.mark.parametrize(("words", "found"), [
    ("aotc comp", "compile"), ("aotc compile --quan", "--quantize-weights"),
    ("aotc compile m.mlir --target cpu:x86-64-v3,cuda:sm_9", "cpu:x86-64-v3,cuda:sm_90a"),
])  # fmt: skip
def test_a_shell_completes_commands_options_and_targets(words, found):
    environment = {
        **os.environ, "_AOTC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
    }  # fmt: skip
    code = "import sys; sys.argv = ['aotc']; from aotc_cli.start import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert found in done.stdout.split(), done


def test_completed_targets_begin_with_what_was_typed():
    assert complete_targets("cpu:p") == ["cpu:portable"]
    assert all(name.startswith("cpu,cuda:") for name in complete_targets("cpu,cuda:"))
    assert complete_targets("nothing") == []
