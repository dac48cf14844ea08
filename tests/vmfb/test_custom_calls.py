"""Custom calls: functions compiled into bundles, functions bound at load, and what is refused."""

import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.differential import LEVELS

import aotc
from aotc.vmfb import custom_calls

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """An empty registry for each test."""
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})


def call(name, shape, dtype, *operands, **attributes):
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, dtype))(*operands, **attributes)


def scaled_exp(x, out, *, scale, shift=1.0):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = math.exp(x[i, j]) * scale + shift


def total(x, out, count):
    out[()] = x.sum()
    count[0] = x.size


def double(x, out):
    for i in range(out.size):
        out.flat[i] = x.flat[i] + x.flat[i]


def model(x):
    y = call("scaled_exp", x.shape, x.dtype, x * 0.5, scale=np.float32(2))
    return y + 1


def expected(x):
    return np.exp(x * 0.5) * 2 + 2


def test_the_documented_examples(capsys):
    scope = {}
    for example in re.findall(r"```python\n(.*?)```", (ROOT / "docs/custom_calls.md").read_text(), re.DOTALL):
        exec(compile(example, "custom_calls.md", "exec"), scope)
    lines = capsys.readouterr().out.splitlines()
    np.testing.assert_allclose(np.array(lines[0].strip("[]").split(), float), np.tanh([2, 3, 3.5]), rtol=1e-5)
    assert lines[1] == "[2 4 1 2 1 1 1 1]"


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_one_function_both_ways(native, level):
    aotc.register_custom_call("scaled_exp", scaled_exp, native=native)
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
    got = aotc.load(aotc.compile(jax.jit(model), x, opt_level=level))(x)
    np.testing.assert_allclose(got, expected(x), rtol=1e-5)


def test_a_compiled_function_runs_without_numba_and_jax(tmp_path):
    aotc.register_custom_call("scaled_exp", scaled_exp)
    x = np.ones((2, 2), "float32")
    (tmp_path / "m.vmfb").write_bytes(aotc.compile(jax.jit(model), x))
    program = (
        "import sys; sys.modules.update(numba=None, llvmlite=None, jax=None, jaxlib=None)\n"
        "import aotc, numpy as np\n"
        f"print(aotc.load({str(tmp_path / 'm.vmfb')!r})(np.ones((2, 2), 'float32'))[0, 0])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert float(done.stdout) == pytest.approx(float(expected(x)[0, 0]), rel=1e-5)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int32", "int64", "float32", "float64", "complex64", "complex128"]
)
def test_every_plain_type(dtype):
    with jax.enable_x64(True):
        x = np.arange(6).astype(dtype).reshape(2, 3)
        for native in (True, False):
            aotc.register_custom_call("copy", copy_flat, native=native)
            got = aotc.load(aotc.compile(jax.jit(lambda x: call("copy", x.shape, x.dtype, x)), x))(x)
            np.testing.assert_array_equal(got, x)


def copy_flat(x, out):
    for i in range(x.size):
        out.flat[i] = x.flat[i]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_small_floats(dtype):
    """Compiled functions see their bits, Python functions the type itself."""
    x = np.arange(6, dtype="float32").astype(jnp.dtype(dtype))
    f = jax.jit(lambda x: call("copy", x.shape, x.dtype, x))
    aotc.register_custom_call("copy", copy_flat)
    np.testing.assert_array_equal(aotc.load(aotc.compile(f, x))(x), x)

    def typed(x, out):
        assert x.dtype == out.dtype == jnp.dtype(dtype)
        out[:] = x

    aotc.register_custom_call("copy", typed, native=False)
    np.testing.assert_array_equal(aotc.load(aotc.compile(f, x))(x), x)


def test_scalars_several_results_and_empty_arrays():
    shapes = (jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((1,), "int32"))
    f = jax.jit(lambda x: jax.ffi.ffi_call("total", shapes)(x))
    for native in (True, False):
        aotc.register_custom_call("total", total, native=native)
        for x in (np.arange(5, dtype="float32"), np.zeros(0, "float32")):
            value, count = aotc.load(aotc.compile(f, x))(x)
            assert (float(value), count.tolist()) == (x.sum(), [x.size])


@pytest.mark.parametrize("native", [True, False])
def test_in_loops_and_branches(native):
    def loop(x):
        def body(state):
            y, n = state
            y = jax.lax.cond(n % 2 == 0, lambda: call("double", y.shape, y.dtype, y), lambda: y + 1)
            return y, n + 1

        return jax.lax.while_loop(lambda s: s[1] < 6, body, (x, 0))[0]

    aotc.register_custom_call("double", double, native=native)
    x = np.arange(4, dtype="float32")
    want = x
    for n in range(6):
        want = want * 2 if n % 2 == 0 else want + 1
    np.testing.assert_array_equal(aotc.load(aotc.compile(jax.jit(loop), x))(x), want)


@pytest.mark.parametrize("native", [True, False])
def test_symbolic_sizes(native):
    aotc.register_custom_call("double", double, native=native)
    n = export.symbolic_shape("n")[0]
    f = jax.jit(lambda x: call("double", x.shape, x.dtype, x) + 1)
    module = aotc.load(aotc.compile(f, jax.ShapeDtypeStruct((n, 2), "float32")))
    for n in (1, 5):
        x = np.arange(2 * n, dtype="float32").reshape(n, 2)
        np.testing.assert_array_equal(module(x), 2 * x + 1)


def test_aliased_results_start_with_the_operand():
    def add_at(x, out):
        out[1] += x[0]

    shape = jax.ShapeDtypeStruct((3,), "float32")
    f = jax.jit(lambda x: (jax.ffi.ffi_call("add_at", shape, input_output_aliases={0: 0})(x), x))
    x = np.array([1, 2, 3], "float32")
    for native in (True, False):
        aotc.register_custom_call("add_at", add_at, native=native)
        new, old = aotc.load(aotc.compile(f, x))(x)
        assert (new.tolist(), old.tolist()) == ([1, 3, 3], [1, 2, 3])


@pytest.mark.parametrize("level", LEVELS)
def test_a_call_without_results(level):
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.add %x, %x : tensor<4xf32>
      stablehlo.custom_call @look(%0) {has_side_effect = true} : (tensor<4xf32>) -> ()
      return %0 : tensor<4xf32>
    }"""
    with pytest.raises(aotc.CompileError, match="custom call @look has no registered function"):
        aotc.compile(text, opt_level=level)
    seen = []
    aotc.register_custom_call("look", lambda x: seen.append(x.copy()), native=False)
    x = np.arange(4, dtype="float32")
    (got,) = aotc.load(aotc.compile(text, opt_level=level, verify_each=True)).invoke("main", x)
    np.testing.assert_array_equal(got, x + x)
    np.testing.assert_array_equal(seen, [x + x])


def test_attributes():
    def keep(x, out, *, flag, count, sizes, word):
        out[:] = [flag, count, sum(sizes), len(word)]

    aotc.register_custom_call("keep", keep, native=False)
    f = jax.jit(lambda x: call("keep", (4,), "float32", x, flag=True, count=7, sizes=np.array([1, 2]), word="four"))
    x = np.zeros(1, "float32")
    assert aotc.load(aotc.compile(f, x))(x).tolist() == [1, 7, 3, 4]


def test_the_same_bundle_for_the_same_function():
    aotc.register_custom_call("scaled_exp", scaled_exp)
    x = np.ones((2, 2), "float32")
    assert aotc.compile(jax.jit(model), x, cache=False) == aotc.compile(jax.jit(model), x, cache=False)


def test_two_loads_with_different_functions():
    aotc.register_custom_call("double", native=False)
    x = np.arange(3, dtype="float32")
    data = aotc.compile(jax.jit(lambda x: call("double", x.shape, x.dtype, x)), x)

    def triple(x, out):
        out[:] = 3 * x

    first, second = (aotc.load(data, custom_calls={"double": f}) for f in (double, triple))
    assert first(x).tolist() == [0, 2, 4]
    assert second(x).tolist() == [0, 3, 6]
    assert first(x).tolist() == [0, 2, 4]


def test_what_the_function_raises_the_call_raises():
    def fails(x, out):
        raise KeyError("seven")

    aotc.register_custom_call("double", fails, native=False)
    x = np.arange(3, dtype="float32")
    module = aotc.load(aotc.compile(jax.jit(lambda x: call("double", x.shape, x.dtype, x)), x))
    for _ in range(2):
        with pytest.raises(aotc.CallError, match="custom call 'double' failed: KeyError: 'seven'"):
            module(x)


def test_operands_cannot_be_written_to():
    def writes(x, out):
        x[0] = 1

    aotc.register_custom_call("double", writes, native=False)
    x = np.arange(3, dtype="float32")
    with pytest.raises(aotc.CallError, match="read-only"):
        aotc.load(aotc.compile(jax.jit(lambda x: call("double", x.shape, x.dtype, x)), x))(x)


def test_an_unknown_call_names_register_custom_call():
    with pytest.raises(aotc.CompileError, match=r"(?s)@scaled_exp has no reg.*test_custom_.*register_custom_call"):
        aotc.compile(jax.jit(model), np.ones((2, 2), "float32"))


def test_a_missing_function_does_not_load():
    aotc.register_custom_call("scaled_exp", native=False)
    data = aotc.compile(jax.jit(model), np.ones((2, 2), "float32"))
    with pytest.raises(aotc.BundleError, match=r"(?s)'scaled_exp', which is not here.*custom_calls="):
        aotc.load(data)


def allocates(x, out):
    out[:] = np.zeros(3, x.dtype)


def raises(x, out):
    if x[0] > 1:
        raise ValueError


def uses_python(x, out):
    out[0] = float(input())


def takes_more(x, y, out):
    out[:] = x


def takes_any(*arrays):
    pass


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (allocates, "it allocates an array"),
        (raises, "raises an exception"),
        (uses_python, "Untyped global name 'input'"),
        (takes_more, "has 2 operands and results"),
        (takes_any, "name each"),
        (print, "is not a Python function"),
    ],
)
def test_functions_that_cannot_be_compiled(function, reason):
    aotc.register_custom_call("f", function)
    with pytest.raises(aotc.CompileError, match=rf"(?s)custom call @f.*{reason}.*native=False"):
        aotc.compile(jax.jit(lambda x: call("f", (3,), "float32", x)), np.ones(3, "float32"))


def test_bad_registrations():
    with pytest.raises(TypeError, match="not a function"):
        aotc.register_custom_call("f", 3)
    with pytest.raises(TypeError, match="native=False takes it at load"):
        aotc.register_custom_call("f")


def test_gpus_have_no_custom_calls():
    aotc.register_custom_call("scaled_exp", scaled_exp)
    with pytest.raises(aotc.CompileError, match="@scaled_exp is not supported on target cuda"):
        aotc.compile(jax.jit(model), np.ones((2, 2), "float32"), target="cuda:sm_80", host_fallback=False)


def stablehlo_call(target):
    return f"""func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> {{
      %0 = stablehlo.custom_call @{target}(%a) : (tensor<2xf32>) -> tensor<2xf32>
      return %0 : tensor<2xf32>
    }}"""


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("xla_ffi_python_cpu_callback", "calls back into the Python process"),
        ("xla_python_cpu_callback", "register_custom_call"),
        ('"__gpu$xla.gpu.triton"', "code for one GPU or TPU"),
        ("triton_kernel_call_ffi", "interpret=True"),
        ("mosaic_gpu_v2", "code for one GPU or TPU"),
        ("tpu_custom_call", "code for one GPU or TPU"),
        ('"__cudnn$fmhaSoftmax"', "plan for a library"),
        ("InspectSharding", "partitioner"),
    ],
)
def test_refusals_say_why(target, reason):
    with pytest.raises(aotc.CompileError, match=reason) as caught:
        aotc.compile(stablehlo_call(target))
    assert target.strip('"') in str(caught.value)


def test_host_callbacks_are_refused():
    f = jax.jit(lambda x: jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((2,), "float32"), x))
    with pytest.raises(aotc.CompileError, match=r"(?s)calls back into the Python process.*register_custom_call"):
        aotc.compile(f, np.ones(2, "float32"))


def test_the_command_line_runs_a_file_that_registers(tmp_path, monkeypatch, capsys):
    from aotc_cli import main as cli_main

    def command(*args):
        monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            cli_main.main()
        return stopped.value.code or 0, capsys.readouterr().out

    ops = tmp_path / "ops.py"
    ops.write_text(
        "import aotc\n\n\ndef double(x, out):\n    out[:] = 2 * x\n\n\n"
        "aotc.register_custom_call('double', double, native=False)\n"
    )
    model, bundle = tmp_path / "m.mlir", tmp_path / "m.vmfb"
    model.write_text(stablehlo_call("double"))
    assert command("compile", model, "-o", bundle, "-q", f"--custom-calls={ops}")[0] == 0
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    assert "calls Python functions, given at load: double" in command("inspect", bundle)[1]
    assert command("run", bundle, "--input=2xf32=1,2")[0] == 1
    code, out = command("run", bundle, "--input=2xf32=1,2", "--expected_output=2xf32=2,4", f"--custom-calls={ops}")
    assert code == 0, out
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    assert "runs here" in command("verify", bundle, f"--custom-calls={ops}")[1]
    assert "p50" in command("bench", bundle, "--seconds=0.01", f"--custom-calls={ops}")[1]


def test_a_helper_that_changes_is_compiled_again():
    scope = {}
    exec("import numba\n@numba.njit\ndef helper(x):\n    return x + 1\n", scope)

    def uses_helper(x, out):
        for i in range(x.size):
            out[i] = helper(x[i])

    x = np.zeros(2, "float32")
    for code, want in (("x + 1", 1), ("x + 2", 2)):
        exec(f"import numba\n@numba.njit\ndef helper(x):\n    return {code}\n", scope)
        helper = scope["helper"]
        aotc.register_custom_call("double", uses_helper)
        got = aotc.load(aotc.compile(jax.jit(lambda x: call("double", x.shape, x.dtype, x)), x))(x)
        assert got.tolist() == [want, want]
