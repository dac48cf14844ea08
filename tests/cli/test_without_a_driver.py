"""What commands do with a bundle for GPUs where there is no driver."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc_cli import main as cli_main

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim


def called(monkeypatch, capsys, *args):
    """The exit code of a command, and what it prints."""
    monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    return stopped.value.code or 0, capsys.readouterr().out


def test_verify_and_inspect_work_without_a_gpu_driver(tmp_path, monkeypatch, capsys):
    """It is checked as far as any machine can."""
    monkeypatch.setattr(driver, "missing", lambda: "no NVIDIA driver")
    path = tmp_path / "m.vmfb"
    data = bytearray(aotc.compile(jax.jit(jnp.sin), np.ones(3, "f4"), target="cuda:sm_90"))
    path.write_bytes(data)
    code, out = called(monkeypatch, capsys, "verify", path)
    assert code == 0
    assert "not run here: no NVIDIA driver" in out
    code, out = called(monkeypatch, capsys, "inspect", path)
    assert code == 0
    assert "k0_sin" in out
    data[-100] ^= 1
    path.write_bytes(data)
    assert called(monkeypatch, capsys, "verify", path)[0] == 1
