"""``aotc lint``: what it says of each op, and that compilation agrees."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import aotc
from aotc.tools.lint import lint
from aotc.vmfb import custom_calls
from aotc_cli import main as cli_main

pytestmark = pytest.mark.cpu

REFUSALS = """func.func public @main(%x: tensor<4x4xf32>, %t: !stablehlo.token) -> (tensor<4x4xf32>, tensor<4xf32>) {
  %0 = stablehlo.add %x, %x : tensor<4x4xf32>
  %1 = "foreign.first"(%0) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %2 = stablehlo.multiply %1, %0 : tensor<4x4xf32>
  %3:2 = "foreign.sizes"(%2) : (tensor<4x4xf32>) -> (tensor<2xi32>, tensor<f32>)
  %4 = stablehlo.dynamic_reshape %2, %3#0 : (tensor<4x4xf32>, tensor<2xi32>) -> tensor<?x?xf32>
  %5 = stablehlo.custom_call @nobody_knows(%2) : (tensor<4x4xf32>) -> tensor<4xf32>
  %6 = func.call @twice(%2) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %7 = func.call @twice(%6) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %7, %5 : tensor<4x4xf32>, tensor<4xf32>
}
func.func private @twice(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = "foreign.second"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}
func.func private @never_called(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
  %0 = "foreign.third"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  return %0 : tensor<4x4xf32>
}"""


def statuses(report):
    """Return the status of each op."""
    return {row.name: row.status for row in report.rows}


def test_every_refusal_is_found_in_one_run():
    (report,) = lint(REFUSALS)
    assert not report.compiles
    assert statuses(report) == {
        "stablehlo.add": "native", "foreign.first": "refused", "stablehlo.multiply": "native",
        "foreign.sizes": "refused", "stablehlo.dynamic_reshape": "waits",
        "stablehlo.custom_call @nobody_knows": "refused", "func.call": "native", "foreign.second": "refused",
    }  # fmt: skip
    assert [(op, f.loc.line) for op, f in report.refusals] == [
        ("foreign.first", 3), ("foreign.sizes", 5), ("foreign.second", 13), ("stablehlo.custom_call @nobody_knows", 7),
    ]  # fmt: skip
    assert all(f.hint for _, f in report.refusals)


def test_a_refused_op_in_a_loop_gives_one_finding():
    text = """func.func @main(%x: tensor<f32>) -> tensor<f32> {
      %0 = stablehlo.while(%a = %x) : tensor<f32>
      cond { %c = "foreign.test"(%a) : (tensor<f32>) -> tensor<i1>
             stablehlo.return %c : tensor<i1> }
      do { %n = stablehlo.negate %a : tensor<f32>
           stablehlo.return %n : tensor<f32> }
      return %0 : tensor<f32>
    }"""
    (report,) = lint(text)
    assert [op for op, _ in report.refusals] == ["foreign.test"]
    assert statuses(report)["stablehlo.while"] == "waits"
    with pytest.raises(aotc.CompileError) as error:
        aotc.compile(text)
    assert [f.message.split()[0] for f in error.value.findings] == ["foreign.test"]


def test_a_refused_function_is_not_reported_as_recursive():
    text = """func.func @main(%x: tensor<f32>) -> (tensor<i32>, tensor<i32>) {
      %0 = func.call @f(%x) : (tensor<f32>) -> tensor<i32>
      %1 = func.call @f(%x) : (tensor<f32>) -> tensor<i32>
      return %0, %1 : tensor<i32>, tensor<i32>
    }
    func.func private @f(%x: tensor<f32>) -> tensor<i32> {
      %0 = "foreign.op"(%x) : (tensor<f32>) -> tensor<i32>
      return %0 : tensor<i32>
    }"""
    (report,) = lint(text)
    assert [(op, f.message) for op, f in report.refusals] == [
        ("foreign.op", "foreign.op on (tensor<f32>) is not supported")
    ]


def test_lint_names_libraries_by_target():
    def f(x):
        return jnp.linalg.eigh(x @ x.T)[1], jnp.linalg.cholesky((x @ x.T)[:64, :64])

    sizes, targets = jax.ShapeDtypeStruct((180, 180), "float32"), "cpu:x86-64-v3,cuda:sm_90a"
    cpu, cuda = lint(jax.jit(f), sizes, target=targets, host_fallback=False)
    through = {row.name: row.through for row in cpu.rows if row.status == "library"}
    assert through == {"stablehlo.custom_call @lapack_ssyevd_ffi": "LAPACK: ssyevd"}
    assert cpu.compiles
    assert statuses(cpu)["stablehlo.dot_general"] == "native"
    assert statuses(cuda)["stablehlo.custom_call @lapack_ssyevd_ffi"] == "refused"
    assert [f.message for _, f in cuda.refusals] == ["LAPACK's syevd is not supported on target cuda:sm_90a"]
    _, cuda = lint(jax.jit(f), sizes, target=targets)
    assert cuda.compiles
    through = {row.name: row.through for row in cuda.rows if row.status == "library"}
    assert through == {"stablehlo.custom_call @lapack_ssyevd_ffi": "LAPACK: ssyevd, on the host"}


CALL = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.custom_call @linted(%x) : (tensor<4xf32>) -> tensor<4xf32>
  return %0 : tensor<4xf32>
}"""


def doubled(x, out):
    for i in range(x.shape[0]):
        out[i] = x[i] * 2


def unsupported(x, out):
    out[:] = sorted({str(v): v for v in x}.values(), key=repr)


@pytest.mark.parametrize(
    ("function", "native", "status", "through"),
    [
        (doubled, True, "library", "your function, compiled into the bundle"),
        (doubled, False, "library", "your function, bound when the bundle loads"),
        (unsupported, True, "refused", ""),
    ],
)
def test_lint_reports_custom_calls(monkeypatch, function, native, status, through):
    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("linted", function, native=native)
    (report,) = lint(CALL)
    assert [(r.status, r.through) for r in report.rows] == [(status, through)]
    if status == "refused":
        with pytest.raises(aotc.CompileError) as error:
            aotc.compile(CALL, cache=False)
        assert [f.message for f in error.value.findings] == [f.message for _, f in report.refusals]
    else:
        aotc.compile(CALL, cache=False)


def exchange(count):
    """Return two exchanges between ``count`` processes."""
    group = ", ".join(map(str, range(count)))
    ops = [
        f"""%{n} = "stablehlo.all_gather"(%x) {{all_gather_dim = 0 : i64, replica_groups = dense<[[{group}]]> :
        tensor<1x{count}xi64>}} : (tensor<4xf32>) -> tensor<{4 * count}xf32>"""
        for n in range(2)
    ]
    t = f"tensor<{4 * count}xf32>"
    return f"func.func @main(%x: tensor<4xf32>) -> ({t}, {t}) {{\n" + "\n".join(ops) + f"\nreturn %0, %1 : {t}, {t}\n}}"


ANY = jax.ShapeDtypeStruct((3, 3), "float32")
MODELS = {
    "elementwise": (lambda x: jnp.tanh(x) + 1, ANY),
    "callback": (lambda x: jax.pure_callback(np.sin, ANY, x) + 1, ANY),
    "one process": (exchange(1),),
    "two processes": (exchange(2),),
    "unknown op": (REFUSALS,),
    "symbolic": (
        export.export(jax.jit(lambda x: jnp.sort(x, 0).sum(1)))(
            jax.ShapeDtypeStruct(export.symbolic_shape("b, 2*b"), "float32")
        ).serialize(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
@pytest.mark.parametrize("name", MODELS)
def test_compile_agrees_with_lint(name, target):
    from aotc.frontend.importer import import_model
    from aotc.lowering.lower import lower
    from aotc.options import Options
    from aotc.pipeline import run_passes
    from aotc.targets import resolve_targets

    model, *args = MODELS[name]
    if callable(model):
        model = jax.jit(model).lower(*args).as_text()
    (report,) = lint(model, target=target)
    findings = []
    try:
        lower(run_passes(import_model(model), Options(target=target)), *resolve_targets(target), Options(target=target))
    except aotc.CompileError as error:
        findings = error.findings
    assert report.compiles == (not findings)
    assert {f.message for f in findings} <= {f.message for _, f in report.refusals}


def run(monkeypatch, capsys, *args):
    """Run the command line; return exit code and output."""
    monkeypatch.setattr(sys, "argv", ["aotc", *map(str, args)])
    with pytest.raises(SystemExit) as stopped:
        cli_main.main()
    return stopped.value.code or 0, capsys.readouterr().out


def test_lint_prints_a_table(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.mlir"
    path.write_text(REFUSALS)
    code, text = run(monkeypatch, capsys, "lint", path)
    assert code == 1
    assert "9 ops, 4 native, 4 refused, 1 waiting for those; it does not compile" in " ".join(text.split())
    assert "multiply" in text
    assert f"{path}:3:8: refused: foreign.first" in text
    assert "try: before compiling, call aotc.register_custom_call" in text
    path.write_text("func.func @main(%x: tensor<3xf32>) -> tensor<3xf32> {\nreturn %x : tensor<3xf32>\n}")
    code, text = run(monkeypatch, capsys, "lint", path)
    assert code == 0
    assert "nothing to do; it compiles" in text


def test_lint_prints_json(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.mlir"
    path.write_text(REFUSALS)
    code, text = run(monkeypatch, capsys, "lint", path, "--json", "--target=cpu:x86-64-v2,cpu:x86-64-v3")
    assert code == 1
    reports = json.loads(text)
    assert [r["target"] for r in reports] == ["cpu:x86-64-v2", "cpu:x86-64-v3"]
    add = reports[0]["ops"][0]
    assert (add["op"], add["dtypes"], add["status"], add["line"]) == ("stablehlo.add", ["f32"], "native", 2)
    assert reports[0]["refusals"][0]["op"] == "foreign.first"
