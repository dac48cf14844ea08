"""The command line on a terminal of 80 or 120 columns: what a person sees of every command, beside what a pipe gets."""

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

import jax
import numpy as np
import pytest
from support import tiny
from typer.main import get_command

import aotc
from aotc.vmfb.weights.tensors import write_tensors
from aotc_cli.main import app

COLUMNS = 80
SECONDS = 300  # of a process that runs many commands
MAIN = "import sys; sys.argv[0] = 'aotc'; from aotc_cli.main import main; main()"
COMMANDS = """
import json, sys
from aotc_cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["aotc", *words]
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code or 0, file=sys.STREAM)
"""
IN_FILES = """
import json, os, sys
from aotc_cli.main import main
codes, folder, commands = [], sys.argv[1], json.loads(sys.argv[2])
for number, words in enumerate(commands):
    for stream in (1, 2):
        with open(os.path.join(folder, f"{number}.{stream}"), "w") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = ["aotc", *words]
    try:
        main()
    except SystemExit as stop:
        codes.append(stop.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
with open(os.path.join(folder, "codes"), "w") as file:
    json.dump(codes, file)
"""
MODEL = (
    "func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n"
    "  %y = stablehlo.{} : tensor<4xf32>\n  return %y : tensor<4xf32>\n}}\n"
)
# So many that compiling them takes longer than what is not worth to be kept.
PRODUCT = """
func.func public @f{0}(%x: tensor<{0}x{0}xf32>) -> tensor<{0}x{0}xf32> {{
  %d = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<{0}x{0}xf32>, tensor<{0}x{0}xf32>) -> tensor<{0}x{0}xf32>
  return %d : tensor<{0}x{0}xf32>
}}"""
UNKNOWN_CALL = "a_custom_call_whose_name_is_longer_than_the_terminal_has_columns_for_in_a_table"
FILES = {
    "m.mlir": MODEL.format("sine %x"),
    "devices.mlir": MODEL.format("cosine %x").replace("tensor<4xf32>)", 'tensor<4xf32> {aotc.affinity = "d0"})', 1),
    "many.mlir": "".join(map(PRODUCT.format, range(100, 180))),
    "call.mlir": MODEL.format(f"custom_call @{UNKNOWN_CALL}(%x)").replace(" : ", " : (tensor<4xf32>) -> ", 1),
}
# The example of RFC 8410.
KEY = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
"""
CASES = {
    "compile": ("m.mlir", "-o", "m.vmfb"),
    "run": ("tiny.vmfb", "--zeros", "--full"),
    "lint": ("m.mlir", "--target=cpu,cuda:sm_90"),
    "explain": ("affinity", "devices.mlir", "--picture=affinity.svg"),
    "report": ("m.vmfb", "-o", "report.html"),
    "diff": ("m.vmfb", "m.mlir"),
    "check": ("m.mlir",),
    "inspect": ("tiny.vmfb",),
    "dump": ("tiny.vmfb", "--bytecode", "--command-buffers"),
    "bench": ("tiny.vmfb", "--against=tiny.vmfb", "--seconds=0.02", "--rounds=1"),
    "profile": ("m.vmfb", "--repeat=1", "-o", "profiled.vmfb"),
    "tune": ("m.vmfb", "--budget=1", "-o", "tuned.vmfb"),
    "verify": ("tiny.vmfb",),
    "upgrade": ("m.vmfb", "-o", "upgraded.vmfb"),
    "update-weights": ("own.vmfb", "w.safetensors", "-o", "new.vmfb"),
    "shard-weights": ("sharded.vmfb", "whole.safetensors", "-o", "shards"),
    "sign": ("tiny.vmfb", "--key=me.key", "-o", "signed.vmfb"),
    "targets": (),
    "doctor": (),
}
ENDLESS = {"serve"}  # tests/serve/test_starting.py has it on a terminal
NEEDS = {"sign": "cryptography", "update-weights": "safetensors"}  # packages that may be missing
TABLES = ("lint", "explain", "inspect", "diff", "bench", "profile", "targets")
COMPILES = ("compile", "check", "upgrade", "profile", "tune", "report", "diff", "update-weights")
MEASURES = ("compile", "upgrade", "bench", "profile")  # they print times
ERRORS = [
    ("nonsense",),
    ("run",),
    ("run", "tiny.vmfb"),
    ("verify", "m.mlir"),
    ("bench", "tiny.vmfb", "--rounds=0"),
    ("compile", "none.mlir", "-o", "x.vmfb"),
    ("compile", "call.mlir", "-o", "x.vmfb"),
    ("compile", "f=m.mlir", "g=call.mlir", "-o", "x.vmfb"),
    ("compile", "f=m.mlir", "f=call.mlir", "-o", "x.vmfb"),
]
CSI = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])")
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3\d|4\d|9\d|10\d)[\d;]*m")


@dataclass(frozen=True)
class Screen:
    """What a command left: exit code, the bytes that the terminal got as text, and what stayed on it."""

    code: int
    raw: str
    stdout: str = ""  # of a command whose stderr alone is the terminal

    @property
    def lines(self):
        """The lines on the terminal at the end, as if none were too wide for it."""
        rows, row, column = [""], 0, 0
        for part in re.split(r"(\x1b\[[\d;?]*[A-Za-z]|\r|\n)", self.raw):
            match = CSI.fullmatch(part)
            if part == "\r":
                column = 0
            elif part == "\n":
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            elif match and match[2] == "A":
                row -= int(match[1] or 1)
            elif match and match[2] == "K":
                assert match[1] == "2"
                rows[row] = ""
            elif match:
                assert match[2] in "mhl", f"{part!r}: teach this test what it does"
            else:
                rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                column += len(part)
        return [line.rstrip() for line in rows]

    @property
    def text(self):
        """The lines as one text."""
        return "\n".join(self.lines)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with models and the tiny bundle, in which commands run."""
    path = tmp_path_factory.mktemp("terminal")
    (path / "tiny.vmfb").write_bytes(tiny.bundle())
    for name, text in {**FILES, "me.key": KEY}.items():
        (path / name).write_text(text)
    return path


def environment(folder, **more):
    """The environment of a person at a terminal, with a cache of its own."""
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return {**inherited, "TERM": "xterm-256color", "AOTC_CACHE_DIR": str(folder / "cache"), **more}


def on_terminal(folder, *words, script=MAIN, only_stderr=False, columns=COLUMNS, **more):
    """Run a command on a terminal; ``only_stderr``: with its stdout in a file."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-c", script, *words]
    with TemporaryFile("w+") as file:
        out = file if only_stderr else slave
        process = subprocess.Popen(
            command, stdin=slave, stdout=out, stderr=slave, cwd=folder, env=environment(folder, **more)
        )
        os.close(slave)
        try:
            raw = read_all(master)
            code = process.wait(SECONDS)
        finally:
            process.kill()
            process.wait()
            os.close(master)
        file.seek(0)
        return Screen(code, raw.replace("\r\n", "\n"), file.read())


def read_all(master):
    """Return all that is written to a terminal until its last process ends."""
    data, end = b"", time.monotonic() + SECONDS
    while select.select([master], [], [], max(0.0, end - time.monotonic()))[0]:
        try:
            part = os.read(master, 1 << 16)
        except OSError:  # what Linux answers when nobody has the terminal open
            part = b""
        if not part:
            return data.decode()
        data += part
    raise AssertionError(f"nothing more after {SECONDS} s: {data.decode()!r}")


def piped(folder, *words, **more):
    """Run a command without a terminal."""
    return subprocess.run(
        [sys.executable, "-c", MAIN, *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd=folder, env=environment(folder, **more),
        timeout=SECONDS,
    )  # fmt: skip


def on_terminals(folder, commands, only_stderr=False):
    """Run commands one after the other in a process on a terminal; return what each leaves."""
    script = COMMANDS.replace("STREAM", "stderr" if only_stderr else "stdout")
    seen = on_terminal(folder, json.dumps(commands), script=script, only_stderr=only_stderr)
    *parts, end = re.split(r"exit (\d+)\n", seen.raw)
    assert (seen.code, end, len(parts)) == (0, "", 2 * len(commands)), seen.text
    assert seen.stdout == ""
    return [Screen(int(code), raw) for raw, code in zip(parts[::2], parts[1::2])]


def in_files(folder, commands):
    """Run commands one after the other in a process, each with streams that are files; return what each leaves."""
    files = folder / "files"
    files.mkdir(exist_ok=True)
    script = [sys.executable, "-c", IN_FILES, files, json.dumps(commands)]
    subprocess.run(
        script, stdin=subprocess.DEVNULL, capture_output=True, cwd=folder, env=environment(folder), timeout=SECONDS,
        check=True,
    )  # fmt: skip
    codes = json.loads((files / "codes").read_text())
    texts = [[(files / f"{number}.{stream}").read_text() for stream in (1, 2)] for number in range(len(commands))]
    return [subprocess.CompletedProcess([], code, *text) for code, text in zip(codes, texts, strict=True)]


def words_of(text, name):
    """The words of an output, without the rules of tables; without figures where they are times."""
    if name == "tune":  # two searches may find different choices
        assert "tried" in text
        return []
    words = [word for word in text.split() if word.strip("─")]
    if name not in MEASURES:
        return sorted(words)
    units = ("s", "ms", "us", "ns")
    return sorted(word for word in words if not re.search(r"\d", word) and word.strip("[],") not in units)


def write_own_weights(folder):
    """Write a bundle with weights of its own, and others for it."""
    from safetensors import numpy

    ones = np.ones(4, "float32")
    own = aotc.compile(lambda params, x: params["w"] * x, {"w": ones}, ones, bind=["params"], weights="unpacked")
    (folder / "own.vmfb").write_bytes(own)
    numpy.save_file({"params/w": 2 * ones}, folder / "w.safetensors")


def write_sharded(folder):
    """Write a bundle for two ranks with bound weights, and a checkpoint of whole arrays."""
    ones = np.ones(4, "float32")
    cut = jax.sharding.PartitionSpec("d")
    flags = {"mesh": {"d": 2}, "in_shardings": (cut, cut), "out_shardings": cut, "bind": ["w"]}
    (folder / "sharded.vmfb").write_bytes(aotc.compile(lambda w, x: w * x, ones, ones, **flags))
    write_tensors(folder / "whole.safetensors", {"w": ones})


def assert_fits(lines):
    """No line is wider than the terminal, but those with a word that has no room in a column."""
    for line in lines:
        assert len(line) <= COLUMNS or any(len(word) > COLUMNS // 2 for word in line.split()), line


def marker_of(name):
    """Return the marker of what a command needs."""
    return pytest.mark.cpu if name in COMPILES else pytest.mark.ir


@pytest.mark.ir
def test_every_command_has_a_terminal_case():
    assert set(get_command(app).commands) == set(CASES) | ENDLESS, "give the new command arguments in CASES"


@pytest.fixture(scope="module")
def commands(folder):
    """What each command of CASES leaves on a terminal and in files: a process for each of the two runs all of them."""
    cases = [[name, *words] for name, words in CASES.items() if name not in NEEDS or find_spec(NEEDS[name])]
    if find_spec("safetensors"):
        write_own_weights(folder)
        write_sharded(folder)
    shown = on_terminals(folder, cases)
    return dict(zip((words[0] for words in cases), zip(shown, in_files(folder, cases), strict=True), strict=True))


@pytest.mark.parametrize("name", [pytest.param(n, marks=marker_of(n)) for n in CASES])
def test_commands_print_equal_text_on_a_terminal_and_in_a_pipe(name, commands):
    """On a terminal a command says the same as in a pipe, laid out to its width."""
    if name not in commands:
        pytest.skip(f"needs {NEEDS[name]}")
    seen, plain = commands[name]
    assert (seen.code, plain.returncode) == (0, 0), seen.text + plain.stderr
    assert plain.stderr == ""
    assert "\x1b" not in plain.stdout
    assert words_of(seen.text, name) == words_of(plain.stdout, name)
    assert_fits(seen.lines)
    assert ("\x1b[1m" in seen.raw) == (name in TABLES)


@pytest.mark.ir
def test_run_prints_as_numpy_on_a_terminal(folder):
    """Elided; in a pipe, with --full and with the options of iree-run-module in IREE's form."""
    words = ("run", "tiny.vmfb", "--function=grow", "--zeros", "--dim=n=2000")
    seen = on_terminal(folder, *words)
    assert seen.text.strip() == "result[0]: 2000xf32 = [0. 0. 0. ... 0. 0. 0.]"
    plain = piped(folder, *words).stdout
    assert plain == f"result[0]: 2000xf32={' '.join('0' * 1024)}...\n"
    assert on_terminal(folder, *words, "--full").raw.replace("\r", "") == plain
    few = on_terminal(folder, *words, "--output_max_element_count=3").text
    assert few.strip() == "result[0]: 2000xf32=0 0 0..."


@pytest.mark.ir
def test_help_of_every_command_fits_the_terminal():
    """Of the command and of every subcommand, in one process: each starts with its usage and ends with exit code 0."""
    names = list(get_command(app).commands)
    commands = [["--help"], *([name, "--help"] for name in names)]
    seen = on_terminal(Path.cwd(), json.dumps(commands), script=COMMANDS.replace("STREAM", "stdout"))
    pages = seen.text.split("exit 0\n")
    assert len(pages) == len(names) + 2, seen.text
    for name, page in zip(["[OPTIONS] COMMAND", *names], pages):
        assert page.startswith(f"Usage: aotc {name}")
    assert "Traceback" not in seen.text
    assert "\x1b" not in seen.raw
    assert_fits(seen.lines)


@pytest.mark.cpu
def test_compile_shows_a_progress_bar_and_a_summary(folder):
    """With default flags: a bar while it works, which leaves nothing, then the summary; again, this alone."""
    words = ("compile", "many.mlir", "-o", "many.vmfb")
    steps = {"importing the compiler", "lowering", "compiling kernels"}
    for again, more in ((False, {}), (True, {}), (False, {"NO_COLOR": "1", "AOTC_CACHE_DIR": str(folder / "other")})):
        seen = on_terminal(folder, *words, **more)
        assert seen.code == 0, seen.text
        assert {step for step in steps if step in seen.raw} == (set() if again else steps)
        assert bool(COLOUR.search(seen.raw)) == (not more and not again)
        assert again or seen.raw.rindex("\x1b[?25h") > seen.raw.rindex("\x1b[?25l"), "the cursor stays hidden"
        summary = r"many\.vmfb: [\d.]+ [kM]B, \d+ kernels, memory peak [\d.]+ [kM]?B, .*s\nruns on .*\n--portable .*\n"
        assert re.fullmatch(summary, seen.text)
    assert len(list((folder / "cache" / "bundles").iterdir())) >= 1


@pytest.mark.cpu
def test_compile_prints_ir_without_line_breaks(folder):
    """The lines of --print-after are not broken where the terminal ends, so that they read back."""
    words = ("compile", "m.mlir", "-o", "m.vmfb", "--print-after=fuse", "--quiet")
    seen, plain = on_terminal(folder, *words[:-1]), piped(folder, *words)
    assert (seen.code, plain.returncode) == (0, 0)
    assert max(map(len, plain.stderr.splitlines())) > COLUMNS
    assert seen.text.startswith(plain.stderr)


@pytest.mark.cpu
def test_compile_prints_nothing_with_quiet_and_a_table_with_timings(folder):
    assert on_terminal(folder, "compile", "m.mlir", "-o", "m.vmfb", "--quiet").raw == ""
    seen = on_terminal(folder, "compile", "m.mlir", "-o", "m.vmfb", "--timings")
    names = [line.rpartition("ms")[0].strip("0123456789. ") for line in seen.lines if line.endswith(" ms")]
    assert names[3:5] == ["inline", "hoist-checks"]
    assert names[-1] == "total"
    assert_fits(seen.lines)


@pytest.mark.cpu
def test_errors_are_the_same_text_on_a_terminal_and_in_a_file(folder):
    """They go to stderr, whether that is a terminal or not, and are the same text there."""
    for words, seen, plain in zip(
        ERRORS, on_terminals(folder, ERRORS, only_stderr=True), in_files(folder, ERRORS), strict=True
    ):
        assert seen.code == plain.returncode != 0, words
        assert plain.stdout == ""
        assert seen.text == plain.stderr
        assert "\x1b" not in plain.stderr
        assert "rror: " in seen.text
        assert "Traceback" not in seen.text


@pytest.mark.ir
def test_labels_of_errors_have_colours_unless_disabled(folder):
    words = ("run", "m.mlir", "--zeros")
    seen = on_terminal(folder, *words)
    assert "\x1b[1;31merror:\x1b[0m" in seen.raw
    assert "\x1b[36mtry:\x1b[0m" in seen.raw
    for plain in ({"NO_COLOR": ""}, {"TERM": "dumb"}):
        assert "\x1b" not in on_terminal(folder, *words, **plain).raw


@pytest.mark.ir
def test_long_names_are_folded_completely(folder):
    """A name wider than the terminal is folded after its underscores, and none of it is missing."""
    seen = on_terminal(folder, "lint", "call.mlir")
    assert seen.code == 1
    rows = seen.lines[3 : seen.lines.index("", 3)]
    assert "".join(row[: row.index("f32") if "f32" in row else None].split()[-1] for row in rows).endswith(UNKNOWN_CALL)
    assert_fits(seen.lines)


# ---------------------------------------------------------------- models with scopes

MODELS = """
import jax, numpy as np, aotc

def saved(f, name, *arguments):
    aotc.compile(f, *arguments, output=f"{name}.vmfb")
    from jax import export
    kinds = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    open(f"{name}.jax", "wb").write(export.export(jax.jit(f))(*kinds).serialize())

x = np.ones((2, 8, 16), "f4")
from flax import nnx

class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.normalization = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.normalization(x))

class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x

net = Net(nnx.Rngs(0))
saved(lambda x: net(x), "nnx", x)
import flax.linen as nn

class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(num_heads=2)(y, y)

class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = LinenBlock()(x)
        return nn.Dense(4)(x)

linen = LinenNet()
saved(linen.apply, "linen", linen.init(jax.random.key(0), x), x)
"""
FITTING = [
    ("inspect", "{}.vmfb", "--all"),
    ("diff", "{}.vmfb", "{}.jax"),
    ("lint", "{}.jax"),
    ("check", "{}.jax"),
    ("bench", "{}.vmfb", "--seconds=0.02", "--rounds=1", "--per-dispatch", "--roofline"),
    ("profile", "{}.vmfb", "--repeat=1", "-o", "{}.json"),
    ("explain", "schedule", "{}.vmfb"),
    ("explain", "memory", "{}.vmfb"),
    ("explain", "fusion", "{}.vmfb"),
    ("explain", "affinity", "{}.jax", "--device=d0=cpu", "--default-device=d0"),
    ("targets",),
    ("doctor",),
]


@pytest.fixture(scope="module")
def scopes(tmp_path_factory):
    """A folder with a model of flax.nnx and one of flax.linen, and bundles of both."""
    pytest.importorskip("flax")
    path = tmp_path_factory.mktemp("scopes")
    subprocess.run([sys.executable, "-c", MODELS], cwd=path, env=environment(path), check=True, timeout=2 * SECONDS)
    return path


@pytest.mark.cpu
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("model", ["nnx", "linen"])
def test_tables_of_models_with_scopes_fit_the_terminal(model, columns, scopes):
    """All commands with tables, in one process: no line is longer than the terminal."""
    commands = [[word.format(model) for word in words] for words in FITTING]
    seen = on_terminal(scopes, json.dumps(commands), script=COMMANDS.replace("STREAM", "stdout"), columns=columns)
    assert seen.lines.count("exit 0") == len(commands), seen.text
    assert max(map(len, seen.lines)) <= columns, seen.text
