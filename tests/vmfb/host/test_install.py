"""The command that brings what is missing."""

import json
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from aotc.vmfb.host import install

REQUIRES = [
    "numpy>=1.26", 'cryptography>=42; extra == "sign"', 'jax>=0.6 ; extra == "compile"',
    'aotc[compile]; extra == "cuda-compile"', 'numba-cuda>=0.30.4,<0.31; extra == "cuda-compile"',
]  # fmt: skip
CHECKOUT = Path(install.__file__).parents[3]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Lets aotc be one that pip has put somewhere, with so much told about where from."""

    def put(told):
        class Distribution:
            requires = REQUIRES

            @staticmethod
            def read_text(name):
                assert name == "direct_url.json"
                return told if told is None else json.dumps(told)

        monkeypatch.setattr(install, "__file__", str(tmp_path / "a" / "b" / "c" / "aotc.py"))
        monkeypatch.setattr(metadata, "distribution", lambda name: Distribution)

    return put


def test_install_command_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(CHECKOUT)
    assert install.install_command("compile") == "pip install '.[compile]'"
    monkeypatch.chdir(tmp_path)
    assert install.install_command("compile") == f"pip install '{CHECKOUT}[compile]'"


def test_install_command_names_packages_if_the_source_is_unknown(installed):
    installed(None)
    assert install.install_command("sign") == "pip install 'cryptography>=42'"
    assert install.install_command("cuda-compile") == "pip install 'jax>=0.6' 'numba-cuda>=0.30.4,<0.31'"
    assert install.install_command() == "pip install 'numpy>=1.26'"


def test_install_command_of_a_wheel_and_of_a_url(installed, tmp_path):
    wheel = tmp_path / "aotc-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"")
    installed({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(install.install_command("sign")) == ["pip", "install", f"{wheel}[sign]"]
    installed({"url": "https://example.org/aotc.git", "vcs_info": {"vcs": "git", "commit_id": "1"}})
    assert install.install_command("sign") == "pip install 'aotc[sign] @ git+https://example.org/aotc.git'"
    assert install.install_command() == "pip install git+https://example.org/aotc.git"


def test_install_command_of_a_folder(installed, tmp_path):
    folder = tmp_path / "it's mine"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    installed({"url": folder.as_uri(), "dir_info": {}})
    command = install.install_command("sign")
    assert shlex.split(command) == ["pip", "install", f"{folder}[sign]"]


@pytest.mark.parametrize("url", ["file:///gone/away", ""])
def test_install_command_of_a_source_that_is_gone(installed, url):
    installed({"url": url})
    assert install.install_command("sign") == "pip install 'cryptography>=42'"


def test_install_command_without_package_metadata(installed, monkeypatch):
    def none(name):
        raise metadata.PackageNotFoundError(name)

    installed(None)
    monkeypatch.setattr(metadata, "distribution", none)
    assert install.install_command("sign") == "install aotc[sign]"
