"""Export a small convolutional network in plain JAX: ``python export_small.py FOLDER``."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from demo_files import save

random = np.random.default_rng(0)


def weights(*shape):
    """Return normal weights with variance 2 / fan-in."""
    return (random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype("float32")


KERNELS = [weights(3, 3, 3, 32), weights(3, 3, 32, 64), weights(3, 3, 64, 128)]
DENSE = weights(128, 10)


def predict(x):
    """Return class probabilities, f32[8, 10], of images, f32[8, 32, 32, 3]."""
    for kernel in KERNELS:
        x = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x)
    return jax.nn.softmax(jnp.mean(x, (1, 2)) @ DENSE)


save(predict, random.standard_normal((8, 32, 32, 3)).astype("float32"))
