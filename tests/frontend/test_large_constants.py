"""Weights of a large model pass through: how often they are in memory at the same time."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.program.ir import Constants
from aotc.lowering.passes.fold_constants import fold_constants
from aotc.options import Options

pytestmark = pytest.mark.cpu
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ("bytecode", 3.3),  # what was given, MLIR's, the bundle; jaxlib's parser takes as much
        ("text", 6.3),  # two characters of text for a byte; the artifact that the bundle keeps is made beside them
    ],
)
def test_peak_memory_of_a_large_constant_is_bounded(form, most):
    """In a process of its own; without the bytes that the process takes for anything else."""
    command = [sys.executable, "-m", "benchmarks", "compile", "memory", "--mb", "64", "--one", form]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    before, peak, _ = json.loads(printed.splitlines()[-1])
    assert before < most - 1
    assert peak < most


def test_large_constants_are_views_of_mlirs_memory():
    w = np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)
    t = "tensor<256x256xf32>"
    text = f"""func.func @main(%x: {t}) -> {t} {{
      %w = stablehlo.constant dense<"0x{w.tobytes().hex().upper()}"> : {t}
      %y = stablehlo.add %w, %x : {t}
      return %y : {t}
    }}"""
    module = import_model(text.encode())
    (found,) = (op.attrs["value"] for op in module.functions["main"].body.ops if op.name == "constant")
    assert not found.flags.owndata
    assert not found.flags.writeable
    constants = Constants()
    constants.add(found, "w")
    assert np.shares_memory(np.frombuffer(constants.parts()[0], np.uint8), found.view(np.uint8).reshape(-1))
    np.testing.assert_array_equal(found, w)
    (y,) = aotc.load(aotc.compile(text.encode())).invoke("main", w)
    np.testing.assert_array_equal(y, w + w)


def test_folding_frees_intermediate_constants():
    """Of a constant that is turned, transposed and padded only the last form is left, and the first if it is read."""
    text = """func.func @main(%x: tensor<3x2xf32>) -> (tensor<3x2xf32>, tensor<2x3xf32>) {
      %w = stablehlo.constant dense<[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]> : tensor<2x3xf32>
      %r = stablehlo.reverse %w, dims = [1] : tensor<2x3xf32>
      %t = stablehlo.transpose %r, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
      %n = stablehlo.negate %t : tensor<3x2xf32>
      %y = stablehlo.add %n, %x : tensor<3x2xf32>
      return %y, %w : tensor<3x2xf32>, tensor<2x3xf32>
    }"""
    folded = fold_constants(import_model(text.encode()), Options()).functions["main"].body
    assert [op.name for op in folded.ops] == ["constant", "constant", "add"]
    np.testing.assert_array_equal(folded.ops[1].attrs["value"], [[-3, -6], [-2, -5], [-1, -4]])
