"""MLIR contexts of jaxlib alone: the same dialects as in JAX's own."""

from jax._src.interpreters import mlir as jax_mlir

from aotc.frontend import contexts

NAMES = (
    "arith.addi", "builtin.module", "cf.br", "chlo.erf", "func.func", "gpu.launch", "llvm.add", "math.erf",
    "memref.alloc", "mhlo.add", "mpmd.named_computation", "scf.if", "sdy.mesh", "stablehlo.add", "tensor.empty",
    "vector.broadcast", "vhlo.add_v1", "no.such_op",
)  # fmt: skip


def registered(context):
    return {name for name in NAMES if context.is_registered_operation(name)}


def test_the_dialects_are_those_of_jax():
    ours, theirs = contexts._dialects_of_jaxlib(), jax_mlir.make_ir_context()
    assert registered(ours) == registered(theirs)
    assert {"stablehlo.add", "chlo.erf", "sdy.mesh"} <= registered(ours)
    assert "no.such_op" not in registered(ours)


def test_another_jaxlib_version_uses_the_context_of_jax(monkeypatch):
    monkeypatch.setattr(contexts, "_jax_mlir_ext", None)
    assert registered(contexts.make_context()) >= {"stablehlo.add", "chlo.erf", "sdy.mesh"}


def test_small_models_share_a_context_and_large_ones_do_not(monkeypatch):
    monkeypatch.setattr(contexts, "_IDLE", [])
    monkeypatch.setattr(contexts, "CONTEXT_USES", 2)
    used = []
    for size in (8, 8, 8, 8, contexts.CONTEXT_MODEL + 1):
        with contexts.mlir_context_for(size) as context:
            used.append(context)
    assert used[0] is used[1] is used[2]
    assert len({id(context) for context in used}) == 3, "the fourth is after as many uses as there may be"


def test_a_context_is_not_shared_concurrently_or_after_a_failure(monkeypatch):
    monkeypatch.setattr(contexts, "_IDLE", [])
    with contexts.mlir_context_for(8) as outer, contexts.mlir_context_for(8) as inner:
        assert inner is not outer
    monkeypatch.setattr(contexts, "_IDLE", [])
    try:
        with contexts.mlir_context_for(8) as failed:
            raise ValueError
    except ValueError:
        pass
    with contexts.mlir_context_for(8) as after:
        assert after is not failed
