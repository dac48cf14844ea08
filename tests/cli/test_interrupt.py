"""Ctrl-C in a command: one line, exit code 130, no process and no file left."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest

pytest.importorskip("typer")
pytest.importorskip("numba")

from aotc_cli import main
from aotc_cli.shared import interrupt

pytestmark = pytest.mark.cpu

# So many kernels that they take longer than any test waits.
SUMS = "".join(
    f"""
func.func public @f{n}(%x: tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32> {{
  %d = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
    : (tensor<{n}x{n}xf32>, tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32>
  return %d : tensor<{n}x{n}xf32>
}}"""
    for n in range(100, 400)
)


def processes_of(group):
    """Return the processes of a session: the command and its compiler processes."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as f:
                fields = f.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(int(name))
    return found


def wait_for(condition):
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="needs /proc")
@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_an_interrupted_compilation_leaves_no_file_or_process(tmp_path, wait):
    """Its compiler processes start up, or compile."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "model.mlir").write_text(SUMS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path / "tmp")}
    environment["AOTC_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-m", "aotc_cli.main", "compile", "model.mlir", "-o", "out.vmfb", "--jobs=2"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            wait_for(lambda: len(processes_of(process.pid)) > 1)
            time.sleep(wait)
            os.killpg(process.pid, signal.SIGINT)
            assert (process.communicate(timeout=60)[1], process.returncode) == ("interrupted\n", 130)
            wait_for(lambda: not processes_of(process.pid))
        finally:
            for left in processes_of(process.pid):
                os.kill(left, signal.SIGKILL)
    assert sorted(p.name for p in tmp_path.iterdir()) in (["model.mlir", "tmp"], ["cache", "model.mlir", "tmp"])
    assert list((tmp_path / "tmp").iterdir()) == []


STRIKE = """
import sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder)
from aotc_cli.start import main
main()
"""


def test_an_interrupt_during_the_imports_ends_the_command():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", STRIKE], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted\n", 130)


def interrupt_once():
    sent = []

    def callback(*args):
        if not sent:
            sent.append(args)
            os.kill(os.getpid(), signal.SIGINT)
            bool(sent)  # some versions of Python run the handler only at the next call or jump

    return callback


def wait_for_it():
    """Wait in short sleeps: a signal that is noted just before a long one begins would be heard at its end."""
    for _ in range(6000):
        time.sleep(0.01)


@pytest.fixture
def interrupts():
    """The handlers of the ``aotc`` command; those of the tests' process come back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with interrupt.resend_dropped_interrupts():
        yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_not_lost_in_a_callback_of_the_collector(interrupts):
    """As jax has one: what it raises ends there, so the interrupt comes again."""
    callback = interrupt_once()
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012
            gc.collect()
            wait_for_it()
    finally:
        gc.callbacks.remove(callback)


def test_an_interrupt_is_not_lost_in_a_finalizer(interrupts):
    class Watched:
        __del__ = interrupt_once()

    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        Watched()
        wait_for_it()


def test_an_interrupt_is_not_lost_in_a_callback_of_a_weak_reference(interrupts):
    class Watched:
        pass

    watched = Watched()
    reference = weakref.ref(watched, interrupt_once())
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        del watched
        wait_for_it()
    assert reference() is None


def test_the_exception_hook_is_restored_after_a_command(monkeypatch):
    before = sys.unraisablehook
    monkeypatch.setattr(sys, "argv", ["aotc", "--version"])
    with pytest.raises(SystemExit):
        main.main()
    assert sys.unraisablehook is before


def test_other_unraisable_exceptions_are_still_printed(interrupts, capsys):
    class Watched:
        def __del__(self):
            raise ValueError("in a finalizer")

    Watched()
    assert "ValueError: in a finalizer" in capsys.readouterr().err


STRIKE_IN_A_LIBRARY = """
import os, signal, sys
sent = []
def strike(frame, event, _):
    caller = frame.f_back.f_code.co_name if frame.f_back else ""
    if not sent and frame.f_code.co_filename.endswith("enum.py") and caller == "_call_with_frames_removed":
        sent.append(os.kill(os.getpid(), signal.SIGINT))
sys.setprofile(strike)
from aotc_cli.start import main
main()
"""


def test_an_interrupt_during_the_start_of_jaxlib_ends_the_command(tmp_path):
    """It makes its enums then, and an exception out of Python code ends the process: the interrupt waits."""
    (tmp_path / "m.mlir").write_text("func.func @main() { return }")
    command = [sys.executable, "-c", STRIKE_IN_A_LIBRARY, "lint", "m.mlir"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted\n", 130)
