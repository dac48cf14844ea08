"""The command that brings what is missing."""

import json
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from aotc.vmfb.host import install

CHECKOUT = Path(install.__file__).parents[3]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lets aotc be one that pip has put somewhere, with so much told about where from."""

    def put(told):
        class Distribution:
            @staticmethod
            def read_text(name):
                assert name == "direct_url.json"
                return told if told is None else json.dumps(told)

        monkeypatch.setattr(install, "__file__", str(tmp_path / "a" / "b" / "c" / "aotc.py"))
        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution)

    return put


def test_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert install.install_command("compile") == "pip install '.[compile]'"
    monkeypatch.chdir(tmp_path)
    assert install.install_command("compile") == f"pip install '{CHECKOUT}[compile]'"


def test_of_an_index(installed):
    installed(None)
    assert install.install_command("sign") == "pip install 'aotc[sign]'"
    assert install.install_command() == "pip install aotc"


def test_of_a_folder_that_pip_installed(installed, tmp_path):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    installed({"url": folder.as_uri(), "dir_info": {}})
    command = install.install_command("sign")
    assert shlex.split(command) == ["pip", "install", f"{folder}[sign]"]


@pytest.mark.parametrize("url", ["file:///gone/away", "https://example.org/aotc.zip", ""])
def test_of_a_place_that_is_no_folder(installed, url):
    installed({"url": url})
    assert install.install_command("sign") == "pip install 'aotc[sign]'"


def test_without_any_record(installed, monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    installed(None)
    monkeypatch.setattr(metadata, "distribution", none)
    assert install.install_command("sign") == "pip install 'aotc[sign]'"

