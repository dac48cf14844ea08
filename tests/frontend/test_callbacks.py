"""Calls back into Python: checks that fail in the bundle with the user's message, and calls that are not checks."""

from __future__ import annotations

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, io_callback

import aotc
from aotc.diagnostics import CompileError
from aotc.vmfb.custom_calls import _REGISTRY
from aotc.vmfb.errors import CallError
from aotc_cli import main as cli_main

pytestmark = pytest.mark.cpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def roots(x):
    checkify.check(jnp.all(x >= 0), "negative: {low:.2f} in {}", x, low=x.min())
    return jnp.sqrt(x)


def discharged(x):
    error, result = checkify.checkify(roots)(x)
    checkify.check_error(error)
    return result


FORMS = {
    "check": roots,
    "check_error": discharged,
    "jitted": jax.jit(roots),
    "traced": jax.jit(roots).trace(X),
}


def compiled(model, *args, **options):
    given = () if isinstance(model, jax.stages.Traced | jax.stages.Lowered) else args
    return aotc.load(aotc.compile(model, *given, **options))


def failure(module, *args):
    with pytest.raises(CallError) as caught:
        module(*args)
    return str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_check_of_checkify_fails_with_its_message(form):
    module = compiled(FORMS[form], X)
    np.testing.assert_allclose(module(X), np.sqrt(X), rtol=1e-6)
    with pytest.raises(checkify.JaxRuntimeError) as wanted:
        checkify.check_error(checkify.checkify(roots)(jnp.asarray(X - 2.5))[0])
    assert str(wanted.value) in failure(module, X - 2.5)


def test_a_returned_checkify_error_fails_the_call():
    module = compiled(checkify.checkify(roots), X)
    np.testing.assert_allclose(module(X)[1], np.sqrt(X), rtol=1e-6)
    assert "negative: -1.00 in [[-1.  0.  1.]" in failure(module, X - 1)


def test_automatic_checkify_checks_fail_with_the_message_of_jax():
    def function(x, i):
        return jnp.log(x[i]) / x[0]

    checked = checkify.checkify(function, errors=checkify.all_checks)
    module = compiled(checked, X[0], np.int32(1))
    np.testing.assert_allclose(module(X[0] + 1, np.int32(1))[1], np.log(np.float32(2)), rtol=1e-6)
    for x, i in ((X[0] + 1, 7), (X[0] - 2, 0), (X[0], 1)):
        message = checked(jnp.asarray(x), i)[0].get()
        assert message.strip() in failure(module, x, np.int32(i))


def test_a_check_under_vmap_fails_with_its_values():
    module = compiled(jax.vmap(roots), X)
    np.testing.assert_allclose(module(X), np.sqrt(X), rtol=1e-6)
    assert "negative: -2.50 in [-2.5 -1.5 -0.5]" in failure(module, X - 2.5)


def in_loop(x, n):
    def step(carry):
        i, y = carry
        checkify.check(y[0] < 20, "step {}: {}", i, y)
        return i + 1, y * 2

    return jax.lax.while_loop(lambda carry: (carry[0] < n) & (carry[1].sum() != 0), step, (0, x))[1]


def in_condition(x, n):
    def going(carry):
        i, y = carry
        checkify.check(y[0] < 20, "before step {}", i)
        return (i < n) & (y[0] != 5)

    return jax.lax.while_loop(going, lambda carry: (carry[0] + 1, carry[1] * 2), (0, x))[1]


def in_branch(x, n):
    def first(y):
        checkify.check(y[0] > 1, "small {}", y[0])
        return y + 1

    def second(y):
        checkify.check(y[1] > 1, "other {}", y[1])
        checkify.check(n < 5, "n is {{{}}}", n)
        return y * 2

    return jax.lax.switch(n, [first, lambda y: y, second], x)


def in_scan_in_branch(x, n):
    def step(total, y):
        total = in_branch(total, y)
        checkify.check(total[0] < 50, "total {}", total[0])
        return total, total.sum()

    return jax.lax.scan(step, x, jnp.arange(3) + n)


NESTED = {
    "loop": (in_loop, [([1, 2], 3), ([1, 2], 9), ([21, 0], 1), ([21, 0], 0), ([0, 0], 5)]),
    "condition": (in_condition, [([1, 2], 3), ([1, 2], 9), ([21, 0], 1), ([5, 0], 3)]),
    "branch": (in_branch, [([2, 2], 0), ([0, 2], 0), ([0, 0], 1), ([0, 2], 2), ([0, 0], 2), ([0, 2], 7), ([0, 0], 7)]),
    "scan": (in_scan_in_branch, [([2, 2], 0), ([0, 2], 0), ([2, 0], 0), ([49, 2], 0), ([2, 2], 4)]),
}


@pytest.mark.parametrize("options", [{}, {"verify_each": True, "bisect": 0}], ids=["all passes", "required passes"])
@pytest.mark.parametrize("name", NESTED)
def test_checks_in_loops_and_branches_fail(name, options):
    function, cases = NESTED[name]
    arrays = [(np.array(x, np.float32), np.int32(n)) for x, n in cases]
    module = compiled(function, *arrays[0], **options)
    checked = jax.jit(checkify.checkify(function))
    for args in arrays:
        error, want = checked(*args)
        if error.get() is None:
            jax.tree.map(np.testing.assert_array_equal, module(*args), want)
        else:
            assert error.get() in failure(module, *args)


def test_a_loop_after_a_failed_check_ends():
    def function(x):
        checkify.check(x > 0, "x is {}", x)
        return jax.lax.while_loop(lambda y: y != 1, lambda y: y // 2, x)

    module = compiled(function, np.int32(8))
    assert module(np.int32(9)) == 1
    assert "x is 0" in failure(module, np.int32(0))  # 0 // 2 is 0 for ever


def test_escaped_braces_of_a_message_are_literal():
    def function(x):
        checkify.check(x > 0, "{{0}} {0} {{1:f32}}", x)
        return x

    assert "{0} -1.5 {1:f32} (`check` failed)" in failure(compiled(function, np.float32(1)), np.float32(-1.5))


VALUES = {
    "bf16": (jnp.bfloat16, "-1.5"), "f64": (np.float64, "-1.5"), "i8": (np.int8, "-2"), "u64": (np.uint64, "255"),
    "c64": (np.complex64, "(-1.5+0j)"), "i1": (np.bool_, "True"), "i4": (jnp.int4, "-2"),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_messages_show_values_of_every_dtype(name):
    dtype, _ = VALUES[name]
    value = np.array({"i": -2, "u": 255, "b": 1}.get(np.dtype(dtype).kind, -1.5) if name != "i4" else -2, dtype)

    def function(x, ok):
        checkify.check(ok, "{} {}", x, jnp.stack([x, x]))
        return ok

    with jax.enable_x64(True):
        module = compiled(function, value, np.True_)
    message = failure(module, value, np.False_)
    assert VALUES[name][1] in message
    assert f"[{VALUES[name][1]}" in message.replace("[ ", "[").replace("-1.5+0.j", "(-1.5+0j)")


def test_a_large_value_is_elided_in_a_message():
    def function(x):
        checkify.check(x.sum() > 0, "bad {}", x)
        return x

    assert "bad <10x10>" in failure(compiled(function, np.ones((10, 10), "f4")), np.zeros((10, 10), "f4"))


# ---------------------------------------------------------------- calls that are not checks


def doubled(x):
    return np.asarray(x) * 2


def calls(x):
    return jax.pure_callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + 1


def effects(x):
    jax.debug.print("x is {}", x)
    jax.debug.callback(doubled, x)
    io_callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x, ordered=True)
    return x + 1


LINE = {"calls": calls.__code__.co_firstlineno + 1, "effects": effects.__code__.co_firstlineno + 1}


@pytest.mark.parametrize("lower", [lambda f: f, lambda f: jax.jit(f).lower(X)], ids=["function", "lowered"])
@pytest.mark.parametrize("function", [calls, effects])
def test_a_callback_is_an_error_at_the_users_line(function, lower):
    with pytest.raises(CompileError) as caught:
        compiled(lower(function), X)
    assert re.search(rf"test_callbacks.py:{LINE[function.__name__]}\b", str(caught.value))
    assert "calls back into the Python process" in str(caught.value)
    assert ("jax.pure_callback of 'doubled'" if function is calls else "jax.debug.print") in str(caught.value)


@pytest.mark.parametrize("lower", [lambda f: f, lambda f: jax.jit(f).lower(X)], ids=["function", "lowered"])
def test_callbacks_drop_removes_only_unused_callbacks(lower):
    with pytest.warns(UserWarning, match="is left out") as warned:
        module = compiled(lower(effects), X, callbacks="drop")
    assert len(warned) == 3
    assert all("test_callbacks.py" in str(w.message) for w in warned)
    np.testing.assert_array_equal(module(X), X + 1)
    with pytest.raises(CompileError, match="'doubled' calls back"):
        compiled(lower(calls), X, callbacks="drop")
    with pytest.raises(CompileError, match="callbacks is 'all'"):
        compiled(lower(calls), X, callbacks="all")


@pytest.mark.parametrize("lower", [lambda f: f, lambda f: jax.jit(f).lower(X)], ids=["function", "lowered"])
def test_a_registered_function_replaces_a_callback(lower):
    def native(x, out):
        for i in range(x.shape[0]):
            for k in range(x.shape[1]):
                out[i, k] = 2 * x[i, k]

    try:
        aotc.register_custom_call("doubled", native)
        np.testing.assert_array_equal(compiled(lower(calls), X)(X), 2 * X + 1)
        with pytest.raises(CompileError, match="'doubled' is ordered"):
            compiled(lower(effects), X, callbacks="drop")
    finally:
        _REGISTRY.clear()


TEXT = """module { func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> {
  %y = stablehlo.custom_call @xla_ffi_python_cpu_callback(%x) {mhlo.backend_config = {index = 0 : ui64}}
    : (tensor<2xf32>) -> tensor<2xf32>
  return %RESULT : tensor<2xf32> } }"""


def test_callbacks_in_text_are_refused_or_dropped():
    with pytest.raises(CompileError, match="'xla_ffi_python_cpu_callback' calls back"):
        aotc.compile(TEXT.replace("RESULT", "y"))
    with pytest.warns(UserWarning, match="is left out"):
        module = aotc.load(aotc.compile(TEXT.replace("RESULT", "x"), callbacks="drop"))
    np.testing.assert_array_equal(module(X[0, :2]), X[0, :2])


def test_callbacks_option_of_the_command_drops_with_a_warning(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.mlir"
    path.write_text(TEXT.replace("RESULT", "x"))
    for flags, code, message in (
        ((), 1, "--callbacks=drop"),
        (("--callbacks=drop",), 0, "warning: "),
        (("--callbacks=drop", "--stop-after=fuse"), 0, "is left out"),
        (("--callbacks=no",), 1, "callbacks is 'no'"),
    ):
        monkeypatch.setattr(sys, "argv", ["aotc", "compile", str(path), "-o", f"{path}.vmfb", *flags])
        with pytest.raises(SystemExit) as ended:
            cli_main.main()
        assert ended.value.code == code
        assert message in capsys.readouterr().err
        if not flags[1:]:
            monkeypatch.setattr(sys, "argv", ["aotc", "lint", str(path), *flags])
            with pytest.raises(SystemExit) as ended:
                cli_main.main()
            assert ended.value.code == code
            assert message in "".join(capsys.readouterr())


ERROR_IF = """module { func.func public @main(%x: tensor<2xf32>, %wrong: tensor<i1>) -> tensor<2xf32> {
  %p = stablehlo.convert %wrong : (tensor<i1>) -> tensor<i32>
  %r = "stablehlo.case"(%p) ({ stablehlo.return %x : tensor<2xf32> }, {
    %i = stablehlo.constant dense<0> : tensor<i32>
    %a = stablehlo.custom_call @aotc.host_callback(%i) {mhlo.backend_config = {
      record = "{\\"kind\\": \\"raise\\", \\"messages\\": [\\"x {0} is wrong\\"]}"}} : (tensor<i32>) -> tensor<2xf32>
    %b = stablehlo.custom_call @aotc.host_callback(%a, %i) {mhlo.backend_config = {
      record = "{\\"kind\\": \\"pass\\"}"}} : (tensor<2xf32>, tensor<i32>) -> tensor<2xf32>
    stablehlo.return %b : tensor<2xf32> }) : (tensor<i32>) -> tensor<2xf32>
  %y = stablehlo.add %RESULT, %RESULT : tensor<2xf32>
  return %y : tensor<2xf32> } }"""


def test_error_if_fails_if_its_value_is_read():
    module = aotc.load(aotc.compile(ERROR_IF.replace("RESULT", "r")))
    np.testing.assert_array_equal(module(X[0, :2], np.False_), 2 * X[0, :2])
    assert failure(module, X[0, :2], np.True_).endswith("x {0} is wrong")
    unread = aotc.load(aotc.compile(ERROR_IF.replace("RESULT", "x")))
    np.testing.assert_array_equal(unread(X[0, :2], np.True_), 2 * X[0, :2])
