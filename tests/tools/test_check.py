"""``aotc check`` on compilers that were broken on purpose: it names the op, the values and the pass."""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import aotc
from aotc import pipeline
from aotc.frontend.importer import import_model
from aotc.frontend.mlir import fetch
from aotc.ir.loop.forms.quantized import dequantize, quantize
from aotc.ir.opset import OPS
from aotc.ir.tensor.ir import Region
from aotc.lowering import lower as stage
from aotc.options import Options
from aotc.pipeline import PASSES, Pass
from aotc.tools.agreement import array_deviation, compare_op, compare_results
from aotc.tools.check import Checker
from aotc.vmfb import custom_calls
from aotc_cli import main as cli_main

pytestmark = pytest.mark.cpu


def renamed(region, old, new):
    """Return ``region`` with ops called ``old`` called ``new``."""
    ops = tuple(
        replace(op, name=new if op.name == old else op.name, regions=tuple(renamed(r, old, new) for r in op.regions))
        for op in region.ops
    )
    return Region(region.params, ops, region.results)


@pytest.fixture
def wrong_kernels(monkeypatch):
    """Make the lowering take one op for another."""

    def install(old, new):
        right = stage.lower_region

        def lower_region(function, target):
            return right(replace(function, body=renamed(function.body, old, new)), target)

        monkeypatch.setattr(stage, "lower_region", lower_region)

    return install


@pytest.fixture
def wrong_pass(monkeypatch):
    """Put a pass into the middle of the pipeline that takes one op for another."""

    def install(old, new, only_if=lambda f: True):
        def mistaken(module, options):
            changed = {
                n: replace(f, body=renamed(f.body, old, new)) if only_if(f) else f for n, f in module.functions.items()
            }
            return replace(module, functions=changed)

        monkeypatch.setattr(pipeline, "PASSES", (*PASSES[:4], Pass(mistaken), *PASSES[4:]))

    return install


def checker(function, *args, **options):
    """Return a checker of a JAX function."""
    return Checker(fetch(jax.jit(function), args), Options(**options))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def model(x):
    y = jnp.tanh(x * 2) + 1
    return jnp.exp(y).sum(1), jnp.maximum(y, 0.5)


@pytest.mark.parametrize("level", [0, 2])
def test_check_of_a_correct_compiler_agrees(level):
    report = checker(model, normal(5, 7), opt_level=level).check([normal(5, 7)], bisect=True)
    assert report.agrees
    assert report.results == (None, None)
    assert report.changed_by == ""


@pytest.mark.parametrize("level", [0, 2])
def test_a_wrong_kernel_is_named(wrong_kernels, level):
    wrong_kernels("max", "min")
    x = normal(5, 7)
    report = checker(model, x, opt_level=level).check([x], bisect=True)
    assert [r is None for r in report.results] == [True, False]
    found = report.difference
    assert (found.op, found.type, found.alone, found.within) == ("max", "f32[5, 7]", True, ())
    assert found.loc.source.startswith(__file__)
    y = np.tanh(x * 2) + 1
    index = found.mismatch.index
    np.testing.assert_allclose(float(found.mismatch.ours), min(y[index], 0.5), rtol=1e-5)
    np.testing.assert_allclose(float(found.mismatch.expected), max(y[index], 0.5), rtol=1e-5)
    assert found.mismatch.count == (y != 0.5).sum()
    assert found.mismatch.units > 100
    assert found.kernels
    assert report.changed_by == ""


def test_a_wrong_pass_is_named(wrong_pass):
    wrong_pass("exp", "expm1")
    x = normal(5, 7)
    report = checker(model, x).check([x], bisect=True)
    assert report.difference.op == "exp"
    assert report.changed_by == "5 mistaken"


def test_a_pass_that_is_wrong_only_in_the_whole_program_is_named(wrong_pass):
    wrong_pass("tanh", "sin", only_if=lambda f: len(f.body.results) <= 2)
    x = normal(5, 7)
    report = checker(model, x).check([x], bisect=True)
    assert report.difference.op == "tanh"
    assert not report.difference.alone
    assert report.changed_by == "5 mistaken"


def test_a_wrong_op_in_a_loop_is_named(wrong_kernels):
    def f(x, n):
        return jax.lax.fori_loop(0, n, lambda i, a: jnp.where(i < 2, a + 1, jnp.maximum(a, i + 3.0) * 2), x)

    wrong_kernels("max", "min")
    x = np.ones((3, 2), "float32")
    report = checker(f, x, np.int32(5)).check([x, np.int32(5)])
    assert report.difference.op == "max"
    (place,) = report.difference.within
    assert place.startswith("body of while, iteration 0")


def test_a_wrong_op_in_a_branch_of_dynamic_size_is_named(wrong_kernels):
    def f(p, x):
        return jax.lax.cond(p > 0, lambda: jnp.sort(x)[::-1], lambda: jnp.sin(x) * x.shape[0])

    wrong_kernels("sin", "cos")
    shapes = jax.ShapeDtypeStruct((), "int32"), jax.ShapeDtypeStruct(export.symbolic_shape("b"), "float32")
    subject = Checker(fetch(export.export(jax.jit(f))(*shapes)), Options())
    assert subject.symbols() == ["b"]
    assert subject.check([np.int32(1), normal(6)]).agrees
    report = subject.check([np.int32(0), normal(6)])
    assert (report.difference.op, report.difference.type) == ("sin", "f32[6]")
    assert report.difference.within[0].startswith("branch")


def test_check_compares_with_xla(wrong_kernels):
    x = normal(5, 7)
    assert checker(model, x).check([x], "jax").agrees
    wrong_kernels("tanh", "sin")
    report = checker(model, x).check([x], "jax")
    assert report.difference.op == "tanh"
    assert report.reference == (None, None)


def test_amplified_rounding_errors_are_not_a_difference(wrong_kernels):
    def chaos(x):
        return jax.lax.fori_loop(0, 80, lambda i, y: 3.99 * y * (1 - y) + jnp.exp(-40.0 - y), x)

    x = np.float32([0.1, 0.31, 0.77])
    subject = checker(chaos, x)
    ours = subject.run(subject.module, "main", [x + np.float32(1e-7)])
    want = subject.run(subject.module, "main", [x])
    assert compare_results(*ours, *want, None) is not None
    assert subject.check([x]).agrees
    wrong_kernels("exp", "floor")
    report = subject.check([x])
    assert report.difference.op == "exp"


WEIGHTS = np.random.default_rng(0).standard_normal((256, 160)).astype("f4")


def quantised(oracle="reference"):
    """The report on a product with weights of 4 bits, and the error that it should tell."""
    x = np.random.default_rng(1).standard_normal((3, 256)).astype("f4")
    checker = Checker(fetch(lambda x: jnp.tanh(x) @ WEIGHTS, (x,)), Options(quantize_weights="int4"))
    integers, scales = quantize(WEIGHTS, 4, 256)
    want = np.tanh(x) @ WEIGHTS
    off = np.tanh(x) @ dequantize(integers, scales, 256) - want
    return checker.check([x], oracle), np.sqrt(np.mean(off**2) / np.mean(want**2)), np.abs(off).max()


@pytest.mark.parametrize("oracle", ["reference", "jax"])
def test_check_reports_the_error_of_quantized_weights(oracle):
    report, relative, largest = quantised(oracle)
    (found,) = report.rounding
    assert report.agrees
    assert "quantized 1 of 1 matrices\n" in str(report)
    assert f"error of rounded weights: {found.relative:.2g} of" in str(report)
    np.testing.assert_allclose((found.relative, found.largest), (relative, largest), rtol=1e-3)
    assert 0.02 < relative < 0.3


def test_check_without_quantized_matrices_prints_the_reasons(recwarn):
    weights = WEIGHTS[:64, :16]
    x = np.ones((3, 64), "f4")
    report = Checker(fetch(lambda x: x @ weights, (x,)), Options(quantize_weights="int4")).check([x])
    assert (report.agrees, report.rounding) == (True, ())
    text = str(report)
    assert "quantized 0 of 1 matrices; left as they are: 1 of at most 64 KiB" in text
    assert "rounded weights" not in text
    assert not [warning for warning in recwarn if "quantize" in str(warning.message)]


def test_faults_are_found_with_quantized_weights(wrong_kernels):
    """By the reference on rounded weights, and op by op on those of the model."""
    wrong_kernels("tanh", "neg")
    report, _, _ = quantised()
    assert not report.agrees
    assert all(report.results)
    assert report.difference.op == "tanh"


def test_array_deviation_computes_relative_and_largest_errors():
    want = np.array([3.0, -4.0, np.inf, np.nan], np.float32)
    found = array_deviation(np.array([3.0, -4.5, np.inf, 1.0], np.float32), want)
    assert (found.relative, found.largest, found.size) == (pytest.approx(0.1), 0.5, 4.0)
    assert array_deviation(np.array([1]), np.array([2])) is None
    nothing = np.zeros(3, np.float32)
    assert array_deviation(nothing, nothing).relative == 0
    assert array_deviation(nothing + 1, nothing).relative == np.inf
    assert array_deviation(nothing[:0], nothing[:0]).largest == 0


def test_check_runs_custom_calls(monkeypatch):
    def twice(x, out):
        for i in range(x.shape[0]):
            out[i] = x[i] * 2

    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("twice", twice)
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.custom_call @twice(%x) : (tensor<4xf32>) -> tensor<4xf32>
      %1 = stablehlo.add %0, %x : tensor<4xf32>
      return %1 : tensor<4xf32>
    }"""
    subject = Checker(fetch(text), Options(cache=False))
    assert subject.check([normal(4)]).agrees
    aotc.register_custom_call("twice", lambda x, out: np.copyto(out, x * 3), native=False)
    (got,) = Checker(fetch(text), Options(cache=False)).run(subject.module, "main", [np.ones(4, "f4")])
    np.testing.assert_array_equal(got, 4)


def test_comparisons_use_the_bound_of_each_op():
    one = np.float32(1)
    near = np.float32([1 + 3 * 2**-23, 1, 1, 1])
    want = np.full(4, one)
    assert compare_op("exp", near, want, lambda: None, None) is None
    assert compare_op("max", near, want, lambda: None, None).count == 1
    far = np.float32([1, 1, 1 + 9 * 2**-23, np.nan])
    found = compare_op("exp", far, want, lambda: None, None)
    assert (found.index, found.count) == ((3,), 2)
    assert compare_op("exp", far[:3], want[:3], lambda: far[:3].astype("f8"), None) is None
    assert compare_results(far[:3], want[:3], None) is None
    assert compare_results(np.int32([1, 2]), np.int32([1, 3]), None).count == 1
    assert compare_results(np.float32([np.inf, np.nan]), np.float32([np.inf, np.nan]), None) is None
    assert compare_results(np.zeros((0, 3)), np.zeros((0, 3)), None) is None
    assert "float32[3]" in compare_results(far[:3], want, None).ours


def test_the_bound_of_a_sum_grows_with_the_number_of_terms():
    want = np.ones(4, np.float32)
    near = want + np.float32([0, 40 * 2**-23, 0, 0])
    assert compare_op("dot_general", near, want, lambda: None, None, 4096) is None
    assert compare_op("dot_general", near, want, lambda: None, None, 400).count == 1


@pytest.mark.parametrize(
    ("op", "shapes", "terms"),
    [
        ("dot_general %x, %y, batching_dims = [0] x [0], contracting_dims = [2] x [1]", [(2, 3, 50), (2, 50, 4)], 50),
        (
            "convolution(%x, %y) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {} "
            "{batch_group_count = 1 : i64, feature_group_count = 1 : i64}",
            [(2, 9, 7), (3, 7, 5)], 21,
        ),
    ],
)  # fmt: skip
def test_the_number_of_terms_of_a_sum_is_counted(op, shapes, terms):
    x, y = ("x".join(map(str, s)) for s in shapes)
    result = "2x3x4" if "dot" in op else "2x7x5"
    text = f"""func.func @main(%x: tensor<{x}xf32>, %y: tensor<{y}xf32>) -> tensor<{result}xf32> {{
      %0 = stablehlo.{op} : (tensor<{x}xf32>, tensor<{y}xf32>) -> tensor<{result}xf32>
      return %0 : tensor<{result}xf32> }}"""
    (found,) = (o for o in import_model(text.encode()).functions["main"].body.ops if OPS[o.name].sums)
    assert OPS[found.name].terms(found.attrs, shapes) == terms


@pytest.mark.parametrize("name", ["add", "reduce", "lt"])
def test_integers_are_compared_exactly(name):
    """The units in the last place that floats may differ by are no bound of integers."""
    want = np.array([1, 2, 3], np.int32)
    assert compare_op(name, want, want, lambda: None, None) is None
    assert compare_op(name, np.array([1, 2, 4], np.int32), want, lambda: None, None).count == 1


def run(monkeypatch, capsys, *args):
    """Run the command line; return exit code, output and messages."""
    monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    return stopped.value.code or 0, *capsys.readouterr()


@pytest.fixture
def file(tmp_path):
    """A model of symbolic sizes in a file."""

    def f(x, y):
        return jnp.exp(x @ y).sum(0)

    a, b = export.symbolic_shape("2*a, b")
    shapes = jax.ShapeDtypeStruct((a, b), "float32"), jax.ShapeDtypeStruct((b, a), "float32")
    path = tmp_path / "model.jax"
    path.write_bytes(export.export(jax.jit(f))(*shapes).serialize())
    return path


def test_check_command_prints_agreement_and_differences(file, monkeypatch, capsys, wrong_kernels):
    code, text, _ = run(monkeypatch, capsys, "check", file, "--oracle=jax", "--dim=b=5")
    assert code == 0
    assert "random arguments, seed 0: a=3, b=5" in text
    assert "agrees with XLA" in text
    code, text, _ = run(monkeypatch, capsys, "check", file, "--input=2x1xf32=0 0")
    assert (code, text.splitlines()[0]) == (0, "random arguments after those that are given, seed 0: a=1, b=1")
    wrong_kernels("exp", "expm1")
    code, text, _ = run(monkeypatch, capsys, "check", file, "--bisect", "--input=2x1xf32=0 0", "--input=1x2xf32=0 0")
    assert code == 3
    text = " ".join(text.split())
    assert "differs from the reference: 2 of 2 elements, the worst at [0] 0.0, expected 2.0" in text
    assert "exp : f32[" in text
    assert f"traced by: jit(f)/exp at {__file__}" in text
    assert "no pass changes the result" in text
    code, text, _ = run(monkeypatch, capsys, "check", file, "--atol=50", "--quantize-weights=int8")
    assert code == 0
    assert "quantized nothing: no matmul of f32, bf16 or f16 has a constant operand" in text
    assert "rounded weights" not in text


def test_check_command_refuses_invalid_arguments(file, tmp_path, monkeypatch, capsys):
    code, _, message = run(monkeypatch, capsys, "check", file, "--input=3x1xf32=0", "--input=1x3xf32=0")
    assert code == 1
    assert "had remainder 1" in message
    assert run(monkeypatch, capsys, "check", tmp_path / "none.mlir")[0] == 1
    assert run(monkeypatch, capsys, "check", file, "--function=other")[0] == 1
    assert run(monkeypatch, capsys, "check", file, "--oracle=other")[0] == 2
    assert "quantize_weights is 'int3'" in run(monkeypatch, capsys, "check", file, "--quantize-weights=int3")[2]
