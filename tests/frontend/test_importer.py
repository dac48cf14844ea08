"""Reading models in every form, and what the entry function says."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.growth import check_linear

import aotc
from aotc.frontend.contexts import make_context
from aotc.frontend.importer import import_model
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import walk

pytestmark = pytest.mark.ir


def mlp(params, x):
    hidden = jax.nn.relu(x @ params["w0"] + params["b0"])
    return {"logits": hidden @ params["w1"], "norm": jnp.linalg.norm(hidden)}


RNG = np.random.default_rng(0)
PARAMS = {
    "w0": RNG.standard_normal((4, 8)).astype(np.float32),
    "b0": RNG.standard_normal(8).astype(np.float32),
    "w1": RNG.standard_normal((8, 3)).astype(np.float32),
}
X = RNG.standard_normal((5, 4)).astype(np.float32)
FLAT = [PARAMS["b0"], PARAMS["w0"], PARAMS["w1"], X]


@pytest.fixture(scope="module")
def exported():
    return export.export(jax.jit(mlp), platforms=("cpu",))(PARAMS, X)


def bytecode(exported):
    from jaxlib.mlir.dialects import stablehlo

    context = make_context()
    with context:
        return stablehlo.deserialize_portable_artifact(context, exported.mlir_module_serialized), context


def write_bytecode(exported):
    import io

    module, _ = bytecode(exported)
    stream = io.BytesIO()
    module.operation.write_bytecode(stream)
    return stream.getvalue()


def generic_text(exported):
    module, _ = bytecode(exported)
    return module.operation.get_asm(print_generic_op_form=True)


FORMS = {
    "function": lambda e: (mlp, PARAMS, X),
    "jitted": lambda e: (jax.jit(mlp), PARAMS, X),
    "specs": lambda e: (mlp, *jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))),
    "exported": lambda e: (e,),
    "text": lambda e: (e.mlir_module(),),
    "text bytes": lambda e: (e.mlir_module().encode(),),
    "generic": lambda e: (generic_text(e),),
    "portable": lambda e: (e.mlir_module_serialized,),
    "bytecode": lambda e: (write_bytecode(e),),
    "memoryview": lambda e: (memoryview(write_bytecode(e)),),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_imports_to_the_same_model(form, exported):
    module = import_model(*FORMS[form](exported))
    assert verify(module) == []
    expected = jax.tree.leaves(mlp(PARAMS, X))
    for found, wanted in zip(interpret(module, *FLAT), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_an_export_blob_is_imported(exported):
    pytest.importorskip("flatbuffers")
    module = import_model(bytes(exported.serialize()))
    assert module.functions["main"].attrs["arg_names"][0] == "params['b0']"


@pytest.mark.parametrize("as_text", [True, False])
def test_a_path_is_imported(tmp_path, exported, as_text):
    path = tmp_path / "model.mlir"
    path.write_bytes(exported.mlir_module().encode() if as_text else exported.mlir_module_serialized)
    for source in (path, str(path)):
        module = import_model(source)
        assert module.functions["main"].loc.path == str(path)


Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    w: object
    bias: object


@jax.tree_util.register_pytree_with_keys_class
class Bag(collections.UserDict):
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.DictKey(k), v) for k, v in sorted(self.items())], tuple(sorted(self))

    @classmethod
    def tree_unflatten(cls, keys, values):
        return cls(zip(keys, values))


def test_registered_pytrees_and_integer_keys_are_imported():
    """The caller's objects go in as they are; where their class does not exist, tuples and dicts do."""

    def fn(weights, bag, layers):
        return Weights(weights.w @ bag["x"], weights.bias + layers[0]), Bag(y=layers[1])

    x = np.eye(2, dtype=np.float32)
    module = aotc.load(aotc.compile(jax.jit(fn), Weights(x, x[0]), Bag(x=x), {0: x[1], 1: x}))
    for weights in (Weights(x, x[0]), (x, x[0]), {"w": x, "bias": x[0]}):
        for bag in (Bag(x=x), {"x": x}):
            found, rest = module(weights, bag, {0: x[1], 1: x})
            assert (found.w.tolist(), found.bias.tolist()) == (x.tolist(), [1, 1])
            assert rest["y"].tolist() == x.tolist()


def test_the_entry_has_argument_names_and_pytrees():
    def fn(point, rest, *, scale=None):
        return [point.x + rest[0], {"b": point.y * scale, "a": rest[1]["k"]}, None]

    args = (Point(X, X), (X, {"k": X}))
    module = import_model(jax.jit(fn), *args, scale=np.float32(2))
    attrs = module.functions["main"].attrs
    assert attrs["arg_names"] == ["point.x", "point.y", "rest[0]", "rest[1]['k']", "scale"]
    assert attrs["arg_places"] == ["args[0].x", "args[0].y", "args[1][0]", "args[1][1]['k']", "kwargs['scale']"]
    assert attrs["parameters"] == ["point", "rest"]
    args_tree, kwargs_tree = attrs["in_tree"]["children"]
    assert [c["kind"] for c in args_tree["children"]] == ["namedtuple", "tuple"]
    assert args_tree["children"][0]["keys"] == ["x", "y"]
    assert kwargs_tree == {
        "kind": "dict",
        "keys": ["scale"],
        "children": [{"kind": "leaf", "keys": [], "children": []}],
    }
    out = attrs["out_tree"]
    assert out["kind"] == "list"
    assert [c["kind"] for c in out["children"]] == ["leaf", "dict", "none"]
    assert out["children"][1]["keys"] == ["a", "b"]
    assert attrs["result_names"] == ["result[0]", "result[1]['a']", "result[1]['b']"]
    assert attrs["kept"] == [0, 1, 2, 3, 4]


def test_unused_arguments_and_donation_are_preserved():
    fn = jax.jit(lambda a, unused, c: (a + c, c * 2), donate_argnums=(0,))
    attrs = import_model(fn, X, X, X).functions["main"].attrs
    assert attrs["kept"] == [0, 1, 2]
    assert attrs["arg_names"] == ["a", "unused", "c"]
    assert attrs["donated"] == [0]


def test_locations_name_the_users_line():
    module = import_model(jax.jit(lambda x: jnp.sin(x)), X)
    (op,) = [op for op in walk(module.functions["main"].body) if op.name == "sin"]
    assert "sin" in op.loc.name
    assert "test_importer.py" in op.loc.source


def test_ops_of_one_source_line_share_a_location():
    def chain(x):
        for _ in range(3):
            x = jnp.sin(x)
        return jnp.sin(x)

    locs = [op.loc for op in walk(import_model(chain, X).functions["main"].body) if op.name == "sin"]
    assert len(locs) == 4
    assert locs[0] is locs[1] is locs[2]
    assert locs[3] != locs[0]


def test_names_are_unique_in_a_function():
    module = import_model(jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda k, v: jnp.sort(v) + v.sum(), x)), X)
    for function in module.functions.values():
        values = [*function.body.params]
        regions = [function.body]
        for op in walk(function.body):
            values += op.results
            regions += op.regions
        values += [p for r in regions[1:] for p in r.params]
        assert len({v.name for v in values}) == len(values)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "int4", "uint8", "bool", "complex64", "float16", "int64"]
)
def test_constants_are_imported_bit_for_bit(dtype):
    with jax.enable_x64(True):
        value = (np.arange(300).reshape(3, 100) % 7).astype(jnp.dtype(dtype))
        module = import_model(jax.jit(lambda i: jnp.asarray(value)[i]), np.int32(1))
        (found,) = interpret(module, np.int32(1))
    np.testing.assert_array_equal(found.view(np.uint8), value[1].view(np.uint8))


@pytest.mark.parametrize("shape", ["b, 4", "2*b, 4", "b + 1, 4", "b, n", "b, 2*b", "b, floordiv(b, 2) + 1"])
def test_symbolic_dims_have_the_names_of_jax(shape):
    spec = jax.ShapeDtypeStruct(export.symbolic_shape(shape), np.float32)
    module = import_model(jax.jit(lambda x: (x + 1).sum(1)), spec)
    (param,) = module.functions["main"].body.params
    expected = shape.replace("floordiv(b, 2) + 1", "(b // 2) + 1")
    assert str(param.type) == f"f32[{expected}]"
    assert all("dynamic" not in op.name for f in module.functions.values() for op in walk(f.body))


def test_unnamed_dims_become_symbols():
    text = """func.func @main(%a: tensor<?x3xf32>, %b: tensor<?x3xf32>) -> tensor<?x3xf32> {
      %0 = stablehlo.add %a, %b : tensor<?x3xf32>
      return %0 : tensor<?x3xf32>
    }"""
    module = import_model(text)
    assert verify(module) == []
    a = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(interpret(module, a, a)[0], a + a)


def test_import_time_is_linear():
    def text(steps):
        def deep(x):
            for k in range(steps):
                x = jnp.sin(x) * (k + 0.5) + x
            return x

        return jax.jit(deep).lower(X).as_text()

    check_linear(text, import_model, 160)


BATCH_NORM = """func.func @main(%x: tensor<4x5x3xf32>, %s: tensor<3xf32>, %o: tensor<3xf32>, %g: tensor<4x5x3xf32>)
    -> (tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>) {
  %y, %m, %v = "stablehlo.batch_norm_training"(%x, %s, %o) {epsilon = 0.001 : f32, feature_index = 2 : i64}
      : (tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>) -> (tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>)
  %dx, %ds, %do = "stablehlo.batch_norm_grad"(%x, %s, %m, %v, %g) {epsilon = 0.001 : f32, feature_index = 2 : i64}
      : (tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<4x5x3xf32>)
      -> (tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>)
  return %y, %m, %v, %dx, %ds, %do : tensor<4x5x3xf32>, tensor<3xf32>, tensor<3xf32>, tensor<4x5x3xf32>,
      tensor<3xf32>, tensor<3xf32>
}"""


def test_batch_normalisation_and_its_gradient_match_jax():
    x, g = (RNG.standard_normal((4, 5, 3)).astype(np.float32) for _ in range(2))
    s, o = (RNG.standard_normal(3).astype(np.float32) for _ in range(2))

    def norm(x, s, o):
        mean, variance = x.mean((0, 1)), x.var((0, 1))
        return (x - mean) / jnp.sqrt(variance + 0.001) * s + o, mean, variance

    (y, mean, variance), pull = jax.vjp(norm, x, s, o)
    expected = (y, mean, variance, *pull((g, jnp.zeros(3), jnp.zeros(3))))
    for found, wanted in zip(interpret(import_model(BATCH_NORM), x, s, o, g), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_shape_assertions_have_the_message_of_jax():
    spec = jax.ShapeDtypeStruct(export.symbolic_shape("2*b, b"), np.float32)
    module = import_model(jax.jit(lambda x: x + 1), spec)
    messages = [message for _, _, _, message, _ in module.functions["main"].attrs["requirements"]]
    assert any("Expected value >= 1 for dimension variable 'b'" in m for m in messages)


def test_chlo_ops_without_a_direct_form_are_decomposed():
    def fn(x):
        return jnp.arcsin(x), jax.scipy.special.gammaln(x), jnp.sinh(x), jax.scipy.special.digamma(x)

    x = np.array([0.1, 0.5, 0.9], np.float32)
    text = jax.jit(fn).lower(x).as_text()
    assert "chlo." in text
    for found, wanted in zip(interpret(import_model(text), x), fn(x), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


CONDITIONS = """func.func @main(%x: tensor<4xf32>, %z: tensor<4xf32>) -> tensor<4xf32> {
  %p = stablehlo.compare LT, %x, %z : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xi1>
  %n = stablehlo.constant dense<7> : tensor<i32>
  stablehlo.custom_call @shape_assertion(%p, %n) {error_message = "beyond {0}", has_side_effect = true}
    : (tensor<4xi1>, tensor<i32>) -> ()
  return %x : tensor<4xf32>
}"""
SIZES = """func.func @main(%x: tensor<?x?xf32>) -> tensor<?x?xf32> {
  %a = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?x?xf32>) -> tensor<i32>
  %b = stablehlo.get_dimension_size %x, dim = 1 : (tensor<?x?xf32>) -> tensor<i32>
  %a1 = stablehlo.reshape %a : (tensor<i32>) -> tensor<1xi32>
  %b1 = stablehlo.reshape %b : (tensor<i32>) -> tensor<1xi32>
  %s = stablehlo.concatenate %a1, %b1, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
  %n = stablehlo.constant dense<[2, 3]> : tensor<2xi32>
  %p = stablehlo.compare GE, %s, %n : (tensor<2xi32>, tensor<2xi32>) -> tensor<2xi1>
  stablehlo.custom_call @shape_assertion(%p, %b) {error_message = "too few: {0}", has_side_effect = true}
    : (tensor<2xi1>, tensor<i32>) -> ()
  return %x : tensor<?x?xf32>
}"""


def test_an_assertion_of_several_conditions_requires_all():
    module = import_model(CONDITIONS)
    x = np.arange(4, dtype=np.float32)
    np.testing.assert_array_equal(interpret(module, x, x + 1)[0], x)
    with pytest.raises(AssertionFailed, match="beyond 7"):
        interpret(module, x, np.float32([9, 9, 2, 9]))
    requirements = import_model(SIZES).functions["main"].attrs["requirements"]
    assert [r[3] for r in requirements] == ["too few: {0}"] * 2


@pytest.mark.parametrize(("imprecise", "precision"), [("true", "DEFAULT"), ("false", "HIGHEST")])
def test_sums_of_8_bit_floats_match_jax(imprecise, precision):
    """Only an algorithm that allows imprecise accumulation has that of tensor cores for such floats."""
    line = (
        "%0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1], algorithm = <lhs_precision_type = f8E5M2, "
        "rhs_precision_type = f8E5M2, accumulation_type = f32, lhs_component_count = 1, rhs_component_count = 1, "
        f"num_primitive_operations = 1, allow_imprecise_accumulation = {imprecise}> : "
        "(tensor<4x4xf8E5M2>, tensor<4x4xf8E5M2>) -> tensor<4x4xf32>"
    )
    text = f"func.func @main(%x: tensor<4x4xf8E5M2>) -> tensor<4x4xf32> {{\n{line}\nreturn %0 : tensor<4x4xf32>\n}}"
    (product,) = (op for op in import_model(text).functions["main"].body.ops if op.name == "dot_general")
    assert product.attrs["precision"] == precision
