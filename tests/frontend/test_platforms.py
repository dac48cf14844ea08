"""Exports for several platforms: one program for each target, loaded and run."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.interpreters.mlir import make_ir_context
from jaxlib.mlir import ir

import aotc
from aotc.frontend.importer import import_model, import_raw
from aotc.frontend.mlir import fetch

pytestmark = pytest.mark.ir

X = np.array([[4.0, 1.0], [1.0, 3.0]], np.float32)


def factor(x):
    return {"factor": jnp.linalg.cholesky(x @ x.T + jnp.eye(x.shape[0])), "eigen": jnp.linalg.eigh(x)[0]}


def by_platform(x):
    return jax.lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x + 2)


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu"), ("tpu", "cuda", "cpu")])
def test_a_multi_platform_export_runs_the_program_of_the_target(platforms):
    exported = export.export(jax.jit(by_platform), platforms=platforms)(X)
    for model in (exported, bytes(exported.serialize())):
        np.testing.assert_array_equal(aotc.load(aotc.compile(model))(X), X + 1)


def test_each_target_has_its_own_program():
    exported = export.export(jax.jit(by_platform), platforms=("cpu", "cuda"))(X)
    data = aotc.compile(exported, target="cpu,cuda:sm_90")
    module = aotc.load(data, devices="cpu")
    assert [a["dims"] for a in module.main.signature.arguments] == [[2, 2]]
    np.testing.assert_array_equal(module(X), X + 1)


def test_platforms_are_selected_in_functions_and_symbolic_dims():
    spec = jax.ShapeDtypeStruct(export.symbolic_shape("n, n"), np.float32)
    exported = export.export(jax.jit(factor), platforms=("cpu", "cuda"))(spec)
    module = aotc.load(aotc.compile(exported))
    got, want = module(X), factor(X)
    assert sorted(got) == sorted(want)
    for name in want:
        np.testing.assert_allclose(np.abs(got[name]), np.abs(want[name]), rtol=1e-5)


def test_a_branch_of_another_platform_is_not_imported():
    """Its custom calls may be none that a bundle can hold."""
    text = """module { func.func public @main(%i: tensor<i32>, %x: tensor<2xf32>) -> tensor<2xf32> {
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %r = "stablehlo.case"(%zero) ({ stablehlo.return %x : tensor<2xf32> }, {
        %y = stablehlo.custom_call @"__gpu$xla.gpu.triton"(%x) : (tensor<2xf32>) -> tensor<2xf32>
        stablehlo.return %y : tensor<2xf32> }) : (tensor<i32>) -> tensor<2xf32>
      return %r : tensor<2xf32> } }"""
    assert all(op.name != "case" for op in import_model(text).functions["main"].body.ops)


def solved(x, y):
    return jnp.linalg.solve(x, y) + by_platform(x)


def bytecode_of(module):
    """The MLIR bytecode of a module."""
    written = io.BytesIO()
    module.operation.write_bytecode(written)
    return written.getvalue()


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu"), ("tpu", "cuda", "cpu")])
@pytest.mark.parametrize("form", ["text", "bytecode"])
def test_mlir_of_a_multi_platform_export_needs_no_platform_argument(platforms, form):
    """MLIR does not name the platforms: the libraries that the branches call show which is which."""
    exported = export.export(jax.jit(solved), platforms=platforms)(X, X)
    with make_ir_context():
        module = ir.Module.parse(exported.mlir_module())
        model = str(module) if form == "text" else bytecode_of(module)
    module = aotc.load(aotc.compile(model))
    assert [a["dims"] for a in module.main.signature.arguments] == [[2, 2], [2, 2]]
    np.testing.assert_allclose(module(X, X), solved(X, X), rtol=1e-5)


@pytest.mark.parametrize("platforms", [("cpu", "cuda"), ("cuda", "cpu")])
def test_mlir_of_a_multi_platform_export_compiles_for_each_target(platforms):
    """Branches that differ show which one each target runs."""

    def function(x, y):
        return jax.lax.platform_dependent(jnp.linalg.solve(x, y), cpu=jnp.sin, cuda=jnp.cos)

    text = export.export(jax.jit(function), platforms=platforms)(X, X).mlir_module()
    for kind, wanted in (("cpu", "sin"), ("cuda", "cos")):
        main = import_raw(fetch(text, (), {}), platform=kind).functions["main"]
        assert {op.name for op in main.body.ops} & {"sin", "cos"} == {wanted}
        assert len(main.body.params) == 2


def test_platform_branches_are_imported_without_jax():
    text = export.export(jax.jit(by_platform), platforms=("cpu", "cuda"))(X).mlir_module()
    np.testing.assert_array_equal(aotc.load(aotc.compile(text))(X), X + 1)
