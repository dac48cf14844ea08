"""Random submissions to memory that they share: results are those of the same calls one after the other."""

import random

import numpy as np
import pytest

import aotc
from aotc.vmfb.submit.memory_order import _READERS, _WRITERS

pytestmark = pytest.mark.cpu

MODEL = """
func.func public @main(%x: tensor<4xf32>, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}
func.func public @update(%x: tensor<4xf32> {tf.aliasing_output = 0 : i32}, %y: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %y : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
SIZE, CELLS, PATIENCE = 4, 40, 60
BEGINS = [*range(0, CELLS - SIZE, SIZE), *range(2, CELLS - SIZE, 3 * SIZE)]


@pytest.fixture(scope="module")
def modules():
    data = aotc.compile(MODEL)
    return [aotc.load(data, threads=1, devices=place) for place in ("cpu:0", "cpu:1")]


class Program:
    """Submissions and what they should compute: results are arrays, or where in the memory they lie."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.memory = np.arange(CELLS, dtype=np.float32)
        self.expected = self.memory.copy()
        self.gates = [aotc.Fence() for _ in range(3)]
        self.results = []  # what may be an argument, with where it lies or what it is

    def argument(self):
        kind = self.random.random()
        if self.results and kind < 0.5:
            return self.random.choice(self.results)
        if kind < 0.8:
            begin = self.random.choice(BEGINS)
            return self.memory[begin : begin + SIZE], begin
        value = np.full(SIZE, self.random.randrange(10), np.float32)
        return value, value

    def value(self, where):
        return self.expected[where : where + SIZE].copy() if isinstance(where, int) else where

    def submit(self, module):
        (x, at_x), (y, at_y) = self.argument(), self.argument()
        wait = [self.random.choice(self.gates)] if self.random.random() < 0.3 else []
        made, where, how = self.value(at_x) + self.value(at_y), None, self.random.random()
        if how < 0.3 and isinstance(x, np.ndarray) and isinstance(at_x, int) and not near(at_x, at_y):
            where, fence = at_x, module.submit("update", x, y, donate=True, wait=wait)
        elif how < 0.6 and not near(begin := self.random.choice(BEGINS), at_x) and not near(begin, at_y):
            where, out = begin, [self.memory[begin : begin + SIZE]]
            fence = module.submit("main", x, y, out=out, wait=wait)
        else:
            fence = module.submit("main", x, y, wait=wait)
        if where is not None:
            self.expected[where : where + SIZE] = made
        self.results.append((fence, made if where is None else where))


def near(one, other):
    return isinstance(one, int) and isinstance(other, int) and abs(one - other) < SIZE


@pytest.mark.parametrize("seed", range(40))
def test_submissions_give_the_results_of_successive_calls(modules, seed):
    program = Program(seed)
    for _ in range(program.random.randint(5, 40)):
        program.submit(program.random.choice(modules))
        if program.random.random() < 0.1:
            program.random.choice(program.gates).signal()
    for gate in program.gates:
        gate.signal()
    for fence, made in program.results:
        (result,) = fence.result(PATIENCE)
        if not isinstance(made, int):
            np.testing.assert_array_equal(result, made)
    np.testing.assert_array_equal(program.memory, program.expected)
    assert {**_READERS, **_WRITERS} == {}


def test_a_result_in_memory_that_was_given_away_is_the_callers(modules):
    value, (module, _) = np.ones(SIZE, np.float32), modules
    for kind in ("device", "numpy", "device", "numpy", "numpy"):
        given = value
        (value,) = module.submit("update", given, np.ones(SIZE, np.float32), donate=True, results=kind).result()
        assert value is not given
        module.submit("main", np.asarray(value), value).wait(PATIENCE)
        with pytest.raises(aotc.CallError, match="was given to"):
            module.submit("main", given, value)
    assert np.asarray(value).tolist() == [6, 6, 6, 6]
