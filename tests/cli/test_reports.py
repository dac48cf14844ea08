"""What commands report: counts, times, signatures, what is missing."""

import sys
from importlib import metadata

import pytest
from support import tiny
from typer.testing import CliRunner

import aotc
from aotc.diagnostics import UNKNOWN
from aotc.kernels.cpu import find_linker
from aotc_cli.main import app
from aotc_cli.shared.units import count_text

pytestmark = pytest.mark.ir


@pytest.fixture
def bundle(tmp_path):
    """Path of the tiny bundle."""
    path = tmp_path / "tiny.vmfb"
    path.write_bytes(tiny.bundle())
    return path


def test_reports_count_with_singular_and_plural():
    assert [count_text(n, "kernel") for n in (0, 1, 2, 1000)] == ["0 kernels", "1 kernel", "2 kernels", "1,000 kernels"]


def test_doctor_reports_missing_packages_and_the_cache(tmp_path, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "missing numpy not installed (needed to run bundles)" in lines
    assert "optional numba not installed (needed to compile)" in lines
    assert "optional nvidia-nvjitlink not installed (needed only to compile for CUDA)" in lines
    assert "optional cryptography not installed (needed only for signatures)" in lines
    assert "is not a folder try: set AOTC_CACHE_DIR to a folder of your own" in " ".join(lines)


def test_doctor_names_a_missing_linker_for_other_architectures(monkeypatch):
    def command(native):
        if native:
            return ("/usr/bin/ld",)
        raise aotc.CompileError.at(UNKNOWN, "found no linker")

    monkeypatch.setattr(find_linker, "linker_command", command)
    text = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    assert "ok linker /usr/bin/ld optional linker for others none (needed to compile for another architecture" in text
    assert "[linker]'" in text


def test_signing_without_cryptography_is_a_user_error(tmp_path, monkeypatch):
    for name in ("cryptography", "cryptography.hazmat.primitives", "cryptography.hazmat.primitives.asymmetric"):
        monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(app, ["sign", "--new-key", str(tmp_path / "k")])
    assert isinstance(done.exception, aotc.BundleError)
    assert "[sign]'" in str(done.exception)
    assert not list(tmp_path.iterdir())
