"""Constants of kinds that the bindings do not show: resources at the end of the text, complex numbers all alike."""

import ml_dtypes
import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.cpu

VALUES = {
    "4xf32": np.float32([1, -2, 0.5, np.inf]),
    "3xbf16": np.array([1, -2, 0.5], ml_dtypes.bfloat16),
    "2x2xf64": np.array([[1.0, 2.0], [3.0, 4.0]]),
    "5xi8": np.int8([1, -2, 3, 127, -128]),
    "3xi1": np.array([True, False, True]),
    "2xcomplex<f32>": np.complex64([1 + 2j, -3j]),
    "3xf8E4M3FN": np.array([1, -2, 0.5], ml_dtypes.float8_e4m3fn),
    "0xf32": np.zeros(0, np.float32),
    "f32": np.float32(7),
}


def model(kind, contents, name="w"):
    resources = f'{{-# dialect_resources: {{ builtin: {{ {name}: "0x{contents}" }} }} #-}}'
    return f"""func.func @main() -> tensor<{kind}> {{
      %c = stablehlo.constant dense_resource<w> : tensor<{kind}>
      return %c : tensor<{kind}>
    }}
    {resources}""".encode()


def bits(array, alignment=8):
    return (alignment.to_bytes(4, "little") + array.tobytes()).hex()


@pytest.mark.parametrize("kind", VALUES)
def test_dense_resource_constants_are_read(kind):
    (found,) = aotc.load(aotc.compile(model(kind, bits(VALUES[kind])))).invoke("main")
    assert found.dtype == VALUES[kind].dtype
    np.testing.assert_array_equal(found, VALUES[kind])


@pytest.mark.parametrize(
    ("contents", "name", "message"),
    [
        ("04000000", "w", "holds 0 bytes of elements, expected 16"),
        (bits(np.zeros(5, "f4")), "w", "holds 20 bytes of elements, expected 16"),
        (bits(np.zeros(4, "f4")), "other", "are not in this file"),
    ],
)
def test_missing_resources_are_an_error(contents, name, message):
    with pytest.raises(CompileError, match=message):
        aotc.compile(model("4xf32", contents, name))


@pytest.mark.parametrize("value", ["(0x7FC00000,0x7FC00000)", "(1.0,-2.0)"])
def test_complex_splats_are_read_from_the_text(value):
    """The bindings refuse to show the attribute at all."""
    text = f"""func.func @main() -> tensor<3xcomplex<f32>> {{
      %c = stablehlo.constant dense<{value}> : tensor<3xcomplex<f32>>
      return %c : tensor<3xcomplex<f32>>
    }}"""
    (found,) = aotc.load(aotc.compile(text)).invoke("main")
    expected = complex(np.nan, np.nan) if "x7" in value else 1 - 2j
    np.testing.assert_array_equal(found, np.full(3, expected, np.complex64))
