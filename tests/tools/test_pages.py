"""The snippets of the guides run, and print what the pages show."""

import runpy
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpu

MADE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "make_snippets.py"))


@pytest.mark.parametrize("path", MADE["PAGES"], ids=lambda path: "/".join(path.parts[-2:]))
def test_snippets_print_what_the_page_shows(path, update):
    for package in MADE["needs"](path.read_text()):
        if find_spec(package) is None:
            pytest.skip(f"needs {package}")
    text = MADE["page"](path)
    if update:
        path.write_text(text)
    assert path.read_text() == text, f"run python docs/make_snippets.py {path.name}"


@pytest.mark.parametrize(
    ("expected", "printed"),
    [("61.5 kB, 2.69 s", "61 kB, 880 ms"), ("a   b\n", "a b"), ("error 1.5e-06", "error 2e-07")],
)
def test_page_outputs_may_differ_in_times_sizes_and_columns(expected, printed):
    assert MADE["same"](expected, printed)


@pytest.mark.parametrize(("expected", "printed"), [("2 kernels", "3 kernels"), ("f32[b, 2]", "f32[2, b]"), ("", "a")])
def test_page_outputs_may_not_differ_in_words_and_counts(expected, printed):
    assert not MADE["same"](expected, printed)


def test_titled_blocks_may_differ_in_numbers():
    assert MADE["same"]("k1  33.6  51 us", "k1  4.5  1.2 ms", any_numbers=True)
    assert not MADE["same"]("k1  33.6", "other  33.6", any_numbers=True)


PORTS = "aotc serve f.vmfb --port={0} --grpc-port={1} & curl localhost:{0}/ 127.0.0.1:{1}, 8741 ms\n"


def test_page_ports_are_replaced_by_free_ones():
    free = {"8741": "40001", "8742": "40002"}
    assert MADE["with_ports"](PORTS.format(8741, 8742), free) == PORTS.format(40001, 40002)
    assert MADE["with_ports"]("localhost:8000", free) == "localhost:8000"


def test_a_page_runs_while_its_port_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = "\n".join([
            "import socket",
            f"port = int('localhost:{port}'.partition(':')[2])",
            "with socket.create_server(('127.0.0.1', port)):",
            "    print(f'listens on 127.0.0.1:{port}')\n",
        ])  # fmt: skip
        page = tmp_path / "page.md"
        page.write_text(f"```python\n{code}```\n")
        assert f"```text\nlistens on 127.0.0.1:{port}\n```" in MADE["page"](page)
