"""Layers of the report: blocks are those that the names of Keras and Flax mean."""

import numpy as np
import pytest

import aotc
from aotc.tools.page.facts import facts_of
from aotc.tools.page.layers import block_names, layer_paths, numbered_scopes, repeated_layers


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("conv1_conv", ("conv1",)),
        ("conv1_bn", ("conv1",)),
        ("conv2_block1_1_conv", ("conv2", "conv2_block1")),
        ("conv2_block1_out", ("conv2", "conv2_block1")),
        ("conv2_block2_out", ("conv2",)),  # the only layer of its block
        ("predictions", ()),
    ],
)
def test_keras_resnet_names_have_blocks(name, blocks):
    names = ["conv1_conv", "conv1_bn", "conv2_block1_1_conv", "conv2_block1_out", "conv2_block2_out", "predictions"]
    assert block_names(names)[name] == blocks


def test_keras_mobilenet_names_have_blocks():
    first = ["expanded_conv_depthwise", "expanded_conv_project", "expanded_conv_squeeze_excite_conv_1"]
    second = ["expanded_conv_1_expand", "expanded_conv_1_squeeze_excite_conv_1"]
    plain = ["conv", "conv_1", "conv_2", "logits", "global_average_pooling2d"]
    blocks = block_names([*first, *second, *plain])
    assert {blocks[name] for name in first} == {("expanded_conv",)}
    assert {blocks[name] for name in second} == {("expanded_conv_1",)}
    assert {blocks[name] for name in plain} == {()}


def test_keras_efficientnet_and_convnext_names_have_blocks():
    names = ["block2a_expand_conv", "block2a_project_bn", "block2b_expand_conv", "block2b_project_bn"]
    assert block_names(names)["block2a_project_bn"] == ("block2a",)
    stages = [f"tiny_stage_{s}_block_{b}_{x}" for s in range(2) for b in range(2) for x in ("conv", "norm")]
    assert block_names(stages)["tiny_stage_1_block_0_norm"] == ("tiny_stage_1", "tiny_stage_1_block_0")


def test_numeric_suffixes_of_keras_are_not_blocks():
    names = ["conv2d", "conv2d_1", "conv2d_transpose", "conv2d_transpose_1", "dense", "dense_1", "batch_norm_1"]
    assert set(block_names(names).values()) == {()}


def test_flax_scopes_are_layers():
    scopes = ["", "GPT/block_0/attn/query", "GPT/block_0/ln_1", "GPT/block_1/ln_1", "GPT/head"]
    assert layer_paths(scopes) == {scope: tuple(filter(None, scope.split("/"))) for scope in scopes}
    assert layer_paths(["Net/block_1_conv", "Net/block_1_norm"])["Net/block_1_norm"] == (
        "Net", "block_1", "block_1_norm",
    )  # fmt: skip


# ---------------------------------------------------------------- layers that share a scope


def test_a_scope_with_repeated_op_sequences_is_several_layers():
    block = [("Net/Block/Norm", "mul"), ("Net/Block/Dense", "dot_general"), ("Net/Block", "add")]
    trace = [("Net/Embed", "gather"), *(3 * block), ("Net/Dense", "dot_general")]
    assert repeated_layers(trace) == {("Net", "Block"): 3}
    assert repeated_layers([*trace, ("Net/Block", "tanh")]) == {}  # another op: not three times the same


def test_ops_that_repeat_in_one_layer_are_one_layer():
    assert repeated_layers([("Net/Dense", "dot_general"), ("Net/Dense", "add")] * 4) == {}


def test_commands_are_numbered_in_the_order_of_the_call():
    scopes = ["Net/Embed", "Net/Block/Dense", "Net/Block/Norm", "Net/Block/Dense", "Net/Block/Norm", "Net/Block/Dense"]
    commands = [(scope, f"{scope} at net.py:1") for scope in scopes]
    assert numbered_scopes(commands, {("Net", "Block"): 3}) == [
        "Net/Embed", "Net/Block #1/Dense", "Net/Block #2/Norm", "Net/Block #2/Dense", "Net/Block #3/Norm",
        "Net/Block #3/Dense",
    ]  # fmt: skip
    assert numbered_scopes(commands, {}) == scopes


def test_flax_nnx_blocks_are_separate_layers():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.up, self.down = (
                nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs),
            )  # fmt: skip

        def __call__(self, x):
            return x + self.down(nnx.relu(self.up(self.norm(x))))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks, self.head = nnx.List([Block(rngs) for _ in range(3)]), nnx.Linear(16, 4, rngs=rngs)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    steps = facts_of(bytes(aotc.compile(Net(nnx.Rngs(0)), np.ones((8, 16), np.float32))), "net")["steps"]
    dots = [s["layer"] for s in steps if s["layer"][-1] == "Linear"]
    expected = [("Net", f"Block #{n}", "Linear") for n in (1, 1, 2, 2, 3, 3)]
    assert [*map(tuple, dots)] == [*expected, ("Net", "Linear")]
