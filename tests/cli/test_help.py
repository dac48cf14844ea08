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

ROOT = Path(__file__).parents[2]
GROUPS = (
    "Arguments", "Options", "Target", "Numbers", "Dynamic shapes", "Weights and state", "Several devices",
    "Memory limits", "Debug", "Examples",
)  # fmt: skip


def help_of(*words):
    done = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.output


def test_options_of_compile_are_in_groups():
    text = help_of("compile")
    places = [text.index(f"\n{group}:\n") for group in GROUPS]
    assert places == sorted(places)
    numbers = text[text.index("\nNumbers:") : text.index("\nDynamic shapes:")]
    assert "--matmul-precision model|bf16|bf16x3|highest" in numbers
    assert "--specialize DIM=SIZE,..." in text
    options = text[text.index("\nOptions:") : text.index("\nExamples:")]
    assert "<" not in options.replace("0<=x<=3", "")  # metavars say more than <str>
    assert max(map(len, text.splitlines())) <= 80


def test_each_example_of_compile_has_a_caption():
    lines = help_of("compile").partition("\nExamples:\n")[2].strip("\n").splitlines()
    captioned = False
    for line in filter(str.strip, lines):
        if line.startswith("    "):
            assert captioned, line
            assert line.strip().startswith("aotc compile ")
        else:
            captioned = line.endswith(":")


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
def test_version(flag):
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
