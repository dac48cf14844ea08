"""Routing of a mixture of experts on a GPU, every subset of its dims dynamic: one answer for every build and level."""

from functools import partial

import numpy as np
import pytest
from support.mixed_dims import DIMS, PROGRAMS, SUBSETS
from vmfb.simulated_gpu import install
from vmfb.test_cuda import gpu, sim
from vmfb.test_trace import traced
from whole.test_mixed_dims import check, tuples

import aotc
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")

GPU = "cuda:sm_90"
SIZES = {"tokens": 7, "experts": 2, "k": 3, "features": 5}
EVERY = frozenset(DIMS)
TOGETHER = {  # what an argument's dims must agree with: (argument, axis, change)
    "scatter": [(0, 0, -1), (0, 0, 1), (0, 2, -1), (1, 0, -1), (1, 0, 1), (1, 1, -1), (1, 1, 1), (2, 0, -1), (2, 1, 1),
                (2, 2, 1)],
    "one_hot": [(0, 0, -1), (0, 1, 1), (1, 0, 1), (1, 1, -1), (2, 0, -1), (2, 0, 1), (2, 1, -1), (2, 1, 1)],
}  # fmt: skip


def compiled(program, dynamic, sizes, level=2):
    return aotc.compile(PROGRAMS[program][0](dynamic, sizes).encode(), target=GPU, opt_level=level)


def of_other_size(arrays, argument, axis, change):
    """Return the arrays with one dim of one of them longer or shorter."""
    x = arrays[argument]
    other = np.take(x, np.arange(x.shape[axis] + change) % x.shape[axis], axis)
    return [*arrays[:argument], other, *arrays[argument + 1 :]]


class TestMixedDimsOnAGpu:
    """On the hardware: results are whole numbers, so they are equal to NumPy's."""

    pytestmark = gpu

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("number", range(16))
    def test_every_subset(self, program, number):
        """Each dynamic dim takes the sizes 0, 1, 2, 7 and 64 with one build; the level goes with the subset."""
        dynamic = SUBSETS[number]
        cases = tuples(dynamic, 10 if dynamic else 1, number)
        module = aotc.load(compiled(program, dynamic, cases[0], (number + len(program)) % 4))
        for seed, sizes in enumerate(cases):
            check(program, module, sizes, seed)

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("level", range(4))
    def test_every_level(self, program, level):
        cases = tuples(EVERY, 25, level)
        module = aotc.load(compiled(program, EVERY, cases[0], level))
        for seed, sizes in enumerate(cases):
            check(program, module, sizes, seed)

    @pytest.mark.parametrize("program", PROGRAMS)
    def test_sizes_that_disagree(self, program):
        """They are errors, and leave the module as it was."""
        module = aotc.load(compiled(program, EVERY, SIZES))
        for seed, change in enumerate(TOGETHER[program]):
            with pytest.raises(CallError, match=r"stablehlo.* at <model>.*\(dimension "):
                module.invoke("main", *of_other_size(PROGRAMS[program][1](SIZES)[0], *change))
            check(program, module, SIZES, seed)

    @pytest.mark.parametrize("program", PROGRAMS)
    @pytest.mark.parametrize("number", [1, 6, 15])
    def test_dispatches_of_builds(self, program, number, tmp_path):
        compare_dispatches(program, SUBSETS[number], tmp_path)


def compare_dispatches(program, dynamic, folder, prepare=lambda data: None):
    """A build with dynamic dims dispatches what the static one does, with the same arrays.

    But for the ops that a scatter in any order is made of: where sizes are known some are folded.
    """
    arguments, wanted = PROGRAMS[program][1](SIZES)
    lists = []
    for dims in (frozenset(), dynamic):
        data = compiled(program, dims, SIZES, 0)
        prepare(data)
        module = aotc.load(data)
        (found,), files = traced(module, folder / "+".join(["run", *sorted(dims)]), *arguments)
        np.testing.assert_array_equal(found, wanted)
        lists.append(sorted(files, key=lambda f: str(f["kernel"])))
    for a, b in zip(*lists, strict=True) if program == "one_hot" else ():
        assert str(a["kernel"]) == str(b["kernel"])
        assert a.keys() == b.keys()
        for key in a.keys() - {"loc"}:
            np.testing.assert_array_equal(a[key], b[key], err_msg=f"{a['kernel']} {key}")


@sim
@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_launched_for_sizes_that_disagree(program, monkeypatch):
    data = compiled(program, EVERY, SIZES)
    install(monkeypatch, data)
    module = aotc.load(data)
    check(program, module, SIZES, 0)
    log = module._executable.gpu.log
    for change in TOGETHER[program]:
        before = list(log)
        with pytest.raises(CallError, match=r"stablehlo.* at <model>.*\(dimension "):
            module.invoke("main", *of_other_size(PROGRAMS[program][1](SIZES)[0], *change))
        assert not {"launch", "graph"} & set(log[len(before) :])
    check(program, module, SIZES, 1)
    assert {"launch", "graph"} & set(log)


@sim
@pytest.mark.parametrize("program", PROGRAMS)
def test_dispatches_of_builds_on_a_simulated_gpu(program, monkeypatch, tmp_path):
    compare_dispatches(program, EVERY, tmp_path, partial(install, monkeypatch))
