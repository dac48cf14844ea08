"""Shared fixtures. ``--update`` rewrites golden texts (the values are checked all the same)."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support import own_process
from support.wide_families import left_out, without_slow


def pytest_configure(config: pytest.Config) -> None:
    """Take interrupts even where the shell started the tests in the background, with interrupts ignored."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What XLA makes of a case on the CPU is what counts, on a machine whose jax would take its GPU too.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # XLA is the oracle, and each case compiles a program for one call: its optimizer takes longer than what it saves.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    config.pluginmanager.register(own_process)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update", action="store_true", help="rewrite the expected text of golden cases")
    parser.addoption("--target", default="cpu", help="what the conformance suite compiles for, as cuda:sm_90")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Collect no slow cases for ``-m "not slow and ..."``: they are two thirds of all cases."""
    yield
    if metafunc.config.option.markexpr.startswith("not slow"):
        metafunc._calls[:] = without_slow(metafunc._calls)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of wide families as slow."""
    for item in left_out(items):
        item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Take what collection made out of the garbage collector's sight: a full collection takes 0.3 s longer with it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the page of conformance after a run of all of it."""
    option = config.option
    if option.markexpr.strip() != "conformance" or option.keyword or option.collectonly:
        return
    import jax
    from conformance.report import rows, text

    outcomes = ("passed", "failed", "skipped")
    table = rows(r for name in outcomes for r in terminalreporter.stats.get(name, ()))
    kind = option.target.partition(":")[0]
    page = "conformance.md" if kind == "cpu" else f"conformance_{kind}.md"
    (config.rootpath / "docs" / page).write_text(text(table, jax.__version__, option.target))


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Should golden files be rewritten?"""
    return bool(request.config.getoption("--update"))


@pytest.fixture
def set_costs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Gives rows of the cost tables other values, in all modules of the compiler that name them."""
    importlib.import_module("aotc.pipeline")  # loads them, also for a test that runs alone

    def set_(**values: int) -> None:
        for name, value in values.items():
            owners = [m for key, m in list(sys.modules.items()) if key.startswith("aotc.") and name in vars(m)]
            assert owners, f"no module has a row {name}"
            for owner in owners:
                monkeypatch.setattr(owner, name, replace(getattr(owner, name), default=value))

    return set_


@pytest.fixture(scope="session", autouse=True)
def own_temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Temporary files and reports of failures, those of processes that tests start too, go with the tests' own."""
    folder = str(tmp_path_factory.mktemp("temporary"))
    os.environ["TMPDIR"] = tempfile.tempdir = folder


@pytest.fixture(scope="module", autouse=True)
def fresh_runtime() -> Iterator[None]:
    """Let each module's tests load an executor of their own: a process keeps the first, which may be a test's own."""
    from aotc.vmfb.devices.cpu import native

    before, native._PROCESS = native._PROCESS, native._Process()
    yield
    native._PROCESS = before


@pytest.fixture(scope="module", autouse=True)
def numba_compiles_for_this_process() -> Iterator[None]:
    """Fail if a module's tests ran Numba's front end as an ahead-of-time compiler outside of a process of its own."""
    yield
    front_end = sys.modules.get("aotc.kernels.numba_aot")
    used = front_end is not None and front_end._numba_context.cache_info().currsize
    assert not used or own_process.REPORTS in os.environ, "mark the test that compiles by Numba with own_process"


@pytest.fixture
def bundles_anew() -> Iterator[None]:
    """No bundle comes from disk, whose key does not say what tests replace; objects may, whose text says all."""
    from aotc.driver import bundle_cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle_cache, "is_cache_usable", lambda options: False)
        yield


@pytest.fixture
def dispatchers_anew(monkeypatch):
    """All dispatcher threads are free: those of earlier tests may still wait for a device or for a loop."""
    from aotc.vmfb.submit.dispatcher_threads import PROCESS, Dispatchers

    monkeypatch.setattr(PROCESS, "dispatchers", Dispatchers())


@pytest.fixture
def no_unrolling(monkeypatch):
    """Compile loops as the model has them, not several iterations as one."""
    from aotc.lowering.program.owners import alternate_buffers

    monkeypatch.setattr(alternate_buffers, "ALTERNATION_PERIOD", 1)
