"""Networks of keras.applications and of keras_hub, with weights from a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from examples.zoo.table import Model, model, normal, seeded, tokens


def of_keras(
    build: Callable[[], Any], *inputs: np.ndarray, names: tuple[str, ...] = (), images: np.ndarray | None = None
) -> Model:
    """Return the network that ``build`` makes; its inputs are in a dict if they have ``names``.

    Norms take the statistics of the batch ``images``, for with 0 and 1 deep layers would drown the signal.
    """
    import keras

    with keras.StatelessScope(initialize_variables=False):  # shapes alone
        network = build()
    weights = seeded([{v.name: v} for v in network.trainable_variables])
    fixed = [_fixed(v) for v in network.non_trainable_variables]
    weights = [x for one in weights for x in one.values()]
    if images is not None:
        for layer in network._flatten_layers():
            if isinstance(layer, keras.layers.BatchNormalization):
                layer.momentum = 0.0
        learn = jax.jit(lambda x: network.stateless_call(weights, fixed, x, training=True)[1])
        fixed = [np.asarray(x) for x in learn(images)]

    def function(*x: Any) -> Any:
        given = dict(zip(names, x)) if names else x[0]
        return network.stateless_call(weights, fixed, given, training=False)[0]

    return Model(function, inputs, [weights, fixed])


def _fixed(variable: Any) -> np.ndarray:
    """Return what a variable that is not trained begins with: statistics, tables of places, seeds."""
    return np.asarray(variable.value)


@model("keras.applications", "MobileNetV3-Small, one image")
def mobilenet_v3_small(small: bool) -> Model:
    import keras

    shape = (32, 32, 3) if small else (224, 224, 3)
    images = 60 * normal(4, *shape) + 120
    return of_keras(
        lambda: keras.applications.MobileNetV3Small(
            shape, alpha=0.25 if small else 1.0, minimalistic=small, weights=None, classifier_activation=None
        ),
        images[:1], images=None if small else images,
    )  # fmt: skip


@model("keras.applications", "EfficientNetV2-B0, one image")
def efficientnet_v2_b0(small: bool) -> Model:
    import keras
    from keras.src.applications.efficientnet_v2 import DEFAULT_BLOCKS_ARGS, EfficientNetV2

    shape = (32, 32, 3) if small else (224, 224, 3)
    blocks = [{**b, "num_repeat": 1} for b in DEFAULT_BLOCKS_ARGS["efficientnetv2-b0"]][1:4:2]
    images, given = 60 * normal(4, *shape) + 120, {"weights": None, "classifier_activation": None}
    if small:
        return of_keras(lambda: EfficientNetV2(0.25, 1.0, 32, blocks_args=blocks, **given), images[:1])
    build = lambda: keras.applications.EfficientNetV2B0(**given)
    return of_keras(build, images[:1], images=images)


@model("keras.applications", "ConvNeXt-Tiny, one image")
def convnext_tiny(small: bool) -> Model:
    import keras
    from keras.src.applications.convnext import ConvNeXt

    shape = (32, 32, 3) if small else (224, 224, 3)
    given = {"weights": None, "classifier_activation": None, "input_shape": shape}
    if small:
        build = lambda: ConvNeXt([1, 1, 1, 1], [8, 16, 16, 32], classes=10, **given)
    else:
        build = lambda: keras.applications.ConvNeXtTiny(**given)
    return of_keras(build, 60 * normal(1, *shape) + 120)


TEXT = ("token_ids", "padding_mask")


@model("keras_hub", "Gemma 3 of 6 layers (width 640, one of two in a window), 128 tokens")
def gemma3(small: bool) -> Model:
    from keras_hub.models import Gemma3Backbone

    sizes = {"vocabulary_size": 16000, "num_layers": 6, "num_query_heads": 4, "num_key_value_heads": 1,
             "hidden_dim": 640, "intermediate_dim": 2048, "head_dim": 256}  # fmt: skip
    if small:
        sizes = {"vocabulary_size": 100, "num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 2,
                 "hidden_dim": 32, "intermediate_dim": 64, "head_dim": 8}  # fmt: skip
    build = lambda: Gemma3Backbone(
        image_size=None, vision_encoder=None, use_query_key_norm=True, use_sliding_window_attention=True,
        sliding_window_size=8 if small else 64, **sizes,
    )  # fmt: skip
    given = tokens(sizes["vocabulary_size"], 1, 16 if small else 128)
    return of_keras(build, given, np.ones_like(given), names=TEXT)


@model("keras_hub", "Mixtral of 4 layers (width 512, 2 of 8 experts), 64 tokens")
def mixtral(small: bool) -> Model:
    from keras_hub.models import MixtralBackbone

    sizes = {"vocabulary_size": 16000, "num_layers": 4, "num_query_heads": 8, "num_key_value_heads": 4,
             "hidden_dim": 512, "intermediate_dim": 1024, "num_experts": 8, "top_k": 2}  # fmt: skip
    if small:
        sizes |= {"vocabulary_size": 100, "num_layers": 1, "num_query_heads": 4, "num_key_value_heads": 2,
                  "hidden_dim": 32, "intermediate_dim": 64, "num_experts": 4}  # fmt: skip
    build = lambda: MixtralBackbone(**sizes, sliding_window=512)
    given = tokens(sizes["vocabulary_size"], 1, 16 if small else 64)
    return of_keras(build, given, np.ones_like(given), names=TEXT)


@model("keras_hub", "SegFormer-B0's encoder (MiT), one image of 224 x 224")
def segformer_b0(small: bool) -> Model:
    from keras_hub.models import MiTBackbone

    shape = (32, 32, 3) if small else (224, 224, 3)
    build = lambda: MiTBackbone(
        layerwise_depths=[1, 1] if small else [2, 2, 2, 2], num_layers=2 if small else 4,
        layerwise_num_heads=[1, 2] if small else [1, 2, 5, 8], layerwise_sr_ratios=[4, 2] if small else [8, 4, 2, 1],
        layerwise_patch_sizes=[7, 3] if small else [7, 3, 3, 3], layerwise_strides=[4, 2] if small else [4, 2, 2, 2],
        max_drop_path_rate=0.0, image_shape=shape, hidden_dims=[8, 16] if small else [32, 64, 160, 256],
    )  # fmt: skip
    return of_keras(build, normal(1, *shape))


@model("keras_hub", "Swin-Tiny, one image")
def swin_tiny(small: bool) -> Model:
    from keras_hub.models import SwinTransformerBackbone

    shape = (32, 32, 3) if small else (224, 224, 3)
    build = lambda: SwinTransformerBackbone(
        image_shape=shape, patch_size=4, embed_dim=16 if small else 96, depths=(1, 1) if small else (2, 2, 6, 2),
        num_heads=(1, 2) if small else (3, 6, 12, 24), window_size=4 if small else 7,
    )  # fmt: skip
    return of_keras(build, normal(1, *shape))
