"""All models of the zoo."""

from examples.zoo import keras_models, own_layers, transformers_models
from examples.zoo.table import ZOO

__all__ = ["ZOO", "keras_models", "own_layers", "transformers_models"]
