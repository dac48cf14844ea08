"""``aotc compile --mesh``, and ``mesh=`` for programs that are read: names of axes, and wrong numbers of devices."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.sharded_models import CASES, check, f32, run_on_threads

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.cpu

# A product as GSPMD writes it: devices alone, without a mesh. Its first argument is cut by rows over pairs of devices.
NAMELESS = """module @product attributes {mhlo.num_partitions = 8 : i32} {
  func.func public @main(
      %x: tensor<8x16xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"},
      %w: tensor<16x12xf32> {mhlo.sharding = "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}"})
      -> (tensor<8x12xf32> {mhlo.sharding = "{devices=[2,1,4]<=[8] last_tile_dim_replicate}"}) {
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
       : (tensor<8x16xf32>, tensor<16x12xf32>) -> tensor<8x12xf32>
    return %y : tensor<8x12xf32>
  }
}
"""


@pytest.fixture
def nameless(tmp_path):
    path = tmp_path / "product.mlir"
    path.write_text(NAMELESS)
    return path


def exported(mesh):
    """Return the blob of a function on a mesh, of which it cuts rows by the first axis, columns by the last one."""
    names = list(mesh)
    mesh = AbstractMesh(tuple(mesh.values()), tuple(names))
    given = [NamedSharding(mesh, spec) for spec in (P(names[0]), P(None, names[-1]))]
    function = jax.jit(lambda x, w: x @ w, in_shardings=given, out_shardings=given[0])
    return jax.export.export(function, platforms=("cpu",))(f32(8, 16), f32(16, 12)).serialize()


def layouts(data):
    return [str(spec) for spec in aotc.inspect(data).functions["main"].inputs]


def check_product(data):
    x, w = f32(8, 16), f32(16, 12)
    for (found,) in run_on_threads(data, (x, w)):
        np.testing.assert_allclose(found, x @ w, 1e-5, 1e-5)


def test_mesh_option_names_axes_of_a_text_without_a_mesh(command, nameless, tmp_path):
    code, said = command("compile", str(nameless), "-o", str(tmp_path / "m.vmfb"), "--mesh=data=2,model=4")
    assert code == 0, said
    data = (tmp_path / "m.vmfb").read_bytes()
    assert aotc.inspect(data).mesh == "data=2 x model=4"
    assert layouts(data) == [
        "arg0: f32[4, 16] of f32[8, 16] cut by data, -", "arg1: f32[16, 3] of f32[16, 12] cut by -, model"
    ]
    check_product(data)


def test_axes_without_names_are_numbered(nameless):
    assert aotc.inspect(aotc.compile(nameless)).mesh == "axis0=2 x axis1=2 x axis2=2"


@pytest.mark.parametrize(("mesh", "shown"), [
    ({"rows": 2, "columns": 4}, "rows=2 x columns=4"),
    ({"rows": 2, "tensor": 2, "expert": 2}, "rows=2 x tensor=2 x expert=2"),
])  # fmt: skip
def test_mesh_option_renames_and_splits_axes_of_an_export(command, tmp_path, mesh, shown):
    (tmp_path / "m.jaxexp").write_bytes(exported({"data": 2, "model": 4}))
    words = ",".join(f"{name}={size}" for name, size in mesh.items())
    code, said = command("compile", str(tmp_path / "m.jaxexp"), "-o", str(tmp_path / "m.vmfb"), "--mesh", words)
    assert code == 0, said
    data = (tmp_path / "m.vmfb").read_bytes()
    assert aotc.inspect(data).mesh == shown
    assert layouts(data)[1].endswith(f"cut by -, {'+'.join(list(mesh)[1:])}")
    check_product(data)


def test_the_bundle_cache_key_includes_the_mesh(monkeypatch, tmp_path):
    """An export is known to the cache by its digest, which says nothing about the names of axes."""
    monkeypatch.setenv("AOTC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("aotc.pipeline.WORTH_SECONDS", 0)
    blob = exported({"data": 2, "model": 4})
    found = [aotc.inspect(aotc.compile(blob, **given)).mesh for given in ({}, {"mesh": {"a": 2, "b": 4}}, {})]
    assert found == ["data=2 x model=4", "a=2 x b=4", "data=2 x model=4"]


def test_renaming_axes_preserves_the_device_order():
    case = CASES["mlp"]
    mesh = AbstractMesh((2, 4), ("data", "model"))
    given = [NamedSharding(mesh, spec) for spec in case.ins]
    function = jax.jit(case.function, in_shardings=given, out_shardings=NamedSharding(mesh, case.outs))
    text = function.trace(*case.args).lower(lowering_platforms=("cpu",)).as_text()
    order = list(range(7, -1, -1))
    moved = text.replace('<["data"=2, "model"=4]>', f'<["data"=2, "model"=4], device_ids={order}>')
    assert moved != text
    check(case, run_on_threads(aotc.compile(moved, mesh={"d": 2, "m": 4}), case.args))


def test_stop_after_prints_the_program_of_a_rank(command, nameless):
    code, said = command("compile", str(nameless), "-o", "-", "--stop-after=inline", "--mesh=data=2,model=4")
    assert code == 0, said
    assert "f32[4, 16]" in said


class TestRefused:
    @pytest.mark.parametrize("text", ["data", "data=", "data=0", "=2", "data=2,data=2", "data=x", "data=2,,model=4"])
    def test_an_invalid_mesh_text_is_refused(self, command, nameless, text):
        code, said = command("compile", str(nameless), "-o", "m.vmfb", "--mesh", text)
        assert (code, "expected AXIS=SIZE" in " ".join(said.split())) == (2, True), said

    def test_a_mesh_of_another_size_is_refused(self, command, nameless, tmp_path):
        code, said = command("compile", str(nameless), "-o", str(tmp_path / "m.vmfb"), "--mesh=data=2,model=2")
        assert code == 1
        assert "product.mlir" in said
        assert "the mesh data=2 x model=2 has the size 4, and the program is for 8 devices" in said
        assert "axes with the product 8, such as data=8" in said

    @pytest.mark.parametrize("mesh", [{"model": 4, "data": 2}, {"a": 4, "b": 2}, {"all": 8}])
    def test_axes_that_split_program_axes_unevenly_are_refused(self, mesh):
        with pytest.raises(CompileError, match="does not fit the program, which is for 8 devices") as caught:
            aotc.compile(exported({"data": 2, "model": 4}), mesh=mesh)
        assert "data=2,model=4" in str(caught.value)

    def test_swapped_axes_are_refused(self):
        with pytest.raises(CompileError, match="does not fit the program"):
            aotc.compile(exported({"data": 2, "model": 2}), mesh={"model": 2, "data": 2})

    def test_axes_without_shardings_are_refused(self, nameless):
        with pytest.raises(CompileError, match="argument 0 is not cut evenly by whole axes of the mesh all=8"):
            aotc.compile(nameless, mesh={"all": 8})

    def test_mesh_option_for_a_one_device_program_is_refused(self, command, tmp_path):
        (tmp_path / "m.mlir").write_text(
            "func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }"
        )
        code, said = command("compile", str(tmp_path / "m.mlir"), "-o", str(tmp_path / "m.vmfb"), "--mesh=data=2")
        assert code == 1
        assert "the program has no shardings, it is for one device" in said
        assert "in_shardings" in said

    def test_shardings_for_a_model_file_are_refused(self, nameless):
        with pytest.raises(CompileError, match="in_shardings and out_shardings are for functions"):
            aotc.compile(nameless, mesh={"data": 8}, in_shardings=P("data"))

    def test_a_mesh_for_the_program_of_a_rank_is_refused(self, command, nameless, tmp_path):
        aotc.compile(nameless, reproducer=str(tmp_path / "r.zip"))
        words = str(tmp_path / "r.zip"), "-o", str(tmp_path / "m.vmfb")
        code, said = command("compile", *words, "--mesh=data=2,model=4")
        assert code == 1
        assert "that of one rank already" in said
