"""Flax models of transformers (the versions before 5 have them), from their configurations."""

from __future__ import annotations

from typing import Any

import numpy as np

from examples.zoo.table import Model, model, normal, seeded, tokens


def of_transformers(network: Any, **inputs: np.ndarray) -> Model:
    """Return a network of transformers with its inputs by name; its first result is the model's."""
    weights, names = seeded(network.params_shape_tree), tuple(inputs)
    return Model(
        lambda *x: network(params=weights, train=False, **dict(zip(names, x)))[0], tuple(inputs.values()), weights
    )


@model("transformers (flax linen)", "ResNet-50, one image")
def resnet50(small: bool) -> Model:
    from transformers import FlaxResNetForImageClassification, ResNetConfig

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 10} if small else {}
    network = FlaxResNetForImageClassification(ResNetConfig(**sizes), input_shape=(1, 224, 224, 3), _do_init=False)
    pixels = 32 if small else 224
    return of_transformers(network, pixel_values=normal(1, 3, pixels, pixels))


@model("transformers (flax linen)", "ViT-B/16, one image")
def vit_b16(small: bool) -> Model:
    from transformers import FlaxViTForImageClassification, ViTConfig

    sizes = {"num_labels": 1000}
    if small:
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
                 "image_size": 32, "patch_size": 8}  # fmt: skip
    config = ViTConfig(**sizes)
    network = FlaxViTForImageClassification(config, _do_init=False)
    return of_transformers(network, pixel_values=normal(1, 3, config.image_size, config.image_size))


@model("transformers (flax linen)", "BERT-base, 128 tokens to classes")
def bert_base(small: bool) -> Model:
    from transformers import BertConfig, FlaxBertForSequenceClassification

    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
             "intermediate_size": 64} if small else {}  # fmt: skip
    config = BertConfig(**sizes)
    network = FlaxBertForSequenceClassification(config, _do_init=False)
    return of_transformers(network, input_ids=tokens(config.vocab_size, 1, 16 if small else 128))


@model("transformers (flax linen)", "GPT-2, logits of 64 tokens")
def gpt2(small: bool) -> Model:
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(**({"vocab_size": 100, "n_embd": 32, "n_layer": 1, "n_head": 2} if small else {}))
    network = FlaxGPT2LMHeadModel(config, _do_init=False)
    return of_transformers(network, input_ids=tokens(config.vocab_size, 1, 16 if small else 64))


@model("transformers (flax linen)", "Llama of 8 layers (width 768, grouped queries), logits of 128 tokens")
def llama(small: bool) -> Model:
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    sizes = {"vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8,
             "num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 256}  # fmt: skip
    if small:
        sizes |= {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                  "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    network = FlaxLlamaForCausalLM(LlamaConfig(**sizes), _do_init=False)
    return of_transformers(network, input_ids=tokens(sizes["vocab_size"], 1, 16 if small else 128))


@model("transformers (flax linen)", "Whisper-tiny: 30 s of sound, 16 tokens")
def whisper_tiny(small: bool) -> Model:
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    sizes = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 6,
             "decoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_ffn_dim": 1536}  # fmt: skip
    if small:
        sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
                 "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100,
                 "max_source_positions": 20, "num_mel_bins": 8, "pad_token_id": 0, "bos_token_id": 1,
                 "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    config = WhisperConfig(**sizes)
    network = FlaxWhisperForConditionalGeneration(config, _do_init=False)
    sound = normal(1, config.num_mel_bins, 2 * config.max_source_positions)
    given = tokens(config.vocab_size, 1, 4 if small else 16)
    return of_transformers(network, input_features=sound, decoder_input_ids=given)


@model("transformers (flax linen)", "CLIP ViT-B/32: an image and four texts of 16 tokens")
def clip(small: bool) -> Model:
    from transformers import CLIPConfig, FlaxCLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**tower, "vocab_size": 100, "eos_token_id": 99} if small else {}
    vision = {**tower, "image_size": 32, "patch_size": 8} if small else {}
    config = CLIPConfig(text_config=text, vision_config=vision)
    network = FlaxCLIPModel(config, _do_init=False)
    pixels, given = config.vision_config.image_size, tokens(config.text_config.vocab_size, 4, 16)
    places = np.arange(16, dtype="int32")[None].repeat(4, 0)
    mask = np.ones((4, 16), "int32")
    return of_transformers(
        network, input_ids=given, pixel_values=normal(1, 3, pixels, pixels), attention_mask=mask, position_ids=places
    )
