"""The self-test of XLA's partitioner in a jaxlib that aotc does not know."""

import re

import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import aotc
from aotc.frontend.partition import partitioner, self_test

pytestmark = pytest.mark.cpu

NEW = "99.1.0"
WRONG = (("xla_backend_optimization_level", 0), ("xla_enable_rgv3_materialization", True))


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Pretend a new jaxlib and an empty cache; return the list of self-tests that ran."""
    runs = []
    ask = self_test.ask_partitioner

    def counted(*given):
        runs.append(given)
        return ask(*given)

    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jaxlib, "__version__", NEW)
    monkeypatch.setattr(self_test, "ask_partitioner", counted)
    self_test._fault_of_version.cache_clear()
    yield runs
    self_test._fault_of_version.cache_clear()


def compiled():
    x = np.linspace(0, 1, 64, dtype="f4").reshape(8, 8)
    return aotc.compile(lambda x: jnp.sum(x, 0), x, mesh={"a": 2, "b": 4}, in_shardings=(P("b", "a"),))


def test_the_groups_follow_from_the_mesh():
    mesh = np.arange(8).reshape(2, 4)  # "a" and "b"
    assert {tuple(column) for column in mesh.T.tolist()} == self_test._GROUPS
    assert mesh.T.ravel().tolist() == self_test._DEVICES


def test_a_tested_version_runs_no_self_test(asked, monkeypatch):
    monkeypatch.setattr(jaxlib, "__version__", min(self_test.TESTED))
    self_test.check_partitioner("")
    assert not asked


def test_a_new_version_is_tested_once_for_each_cache_folder(asked):
    assert aotc.inspect(compiled()).mesh == "a=2 x b=4"
    self_test.check_partitioner("")
    assert len(asked) == 1
    self_test._fault_of_version.cache_clear()  # as in another process
    self_test.check_partitioner("")
    assert len(asked) == 1


def test_another_version_is_tested_again(asked, monkeypatch):
    self_test.check_partitioner("")
    monkeypatch.setattr(jaxlib, "__version__", "99.2.0")
    self_test.check_partitioner("")
    assert len(asked) == 2


def test_the_known_silent_error_is_refused(asked, monkeypatch):
    monkeypatch.setattr(partitioner, "FLAGS", WRONG)
    for _ in range(2):
        with pytest.raises(aotc.CompileError, match=f"jaxlib {NEW} fails a small test") as caught:
            compiled()
        self_test._fault_of_version.cache_clear()
    assert "all_reduce has the groups" in str(caught.value)
    assert "with which aotc is tested" in str(caught.value)
    assert len(asked) == 2  # a failure is not stored


def test_a_child_that_crashes_is_a_failure(asked, monkeypatch):
    monkeypatch.setattr(partitioner, "_CHILD", "raise SystemExit(3)")
    with pytest.raises(aotc.CompileError, match=r"fails a small test.*ended"):
        compiled()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (("stablehlo.all_reduce", "stablehlo.all_gather"), "cannot be read|the collectives are|has the groups"),
        (("[[0, 4], [1, 5]", "[[0, 1], [4, 5]"), "has the groups"),
    ],
)
def test_programs_with_other_collectives_are_found(monkeypatch, change, fault):
    ask = self_test.ask_partitioner

    def changed(*given):
        from jaxlib.mlir import ir

        reply, local = ask(*given)
        return reply, str(ir.Module.parse(local)).replace(*change).encode()

    monkeypatch.setattr(self_test, "ask_partitioner", changed)
    assert re.search(fault, self_test.run_self_test())


def test_other_layouts_are_found(monkeypatch):
    ask = self_test.ask_partitioner
    monkeypatch.setattr(self_test, "ask_partitioner", lambda *given: ({**ask(*given)[0], "arguments": [{}]}, b""))
    assert "the layouts are" in self_test.run_self_test()


def test_the_version_in_use_passes():
    assert self_test.run_self_test() == ""
