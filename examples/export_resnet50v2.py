"""Export Keras's ResNet50V2 with random weights: ``python export_resnet50v2.py FOLDER``."""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import keras
import numpy as np
from demo_files import save

keras.utils.set_random_seed(0)
model = keras.applications.ResNet50V2(weights=None, classifier_activation=None)
trained = [np.asarray(v.value) for v in model.trainable_variables]

# Statistics from a batch: with the initial ones (0 and 1) random layers would drown the signal.
images = np.random.default_rng(0).standard_normal((4, 224, 224, 3)).astype("float32")
for layer in model.layers:
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.momentum = 0.0
start = [np.asarray(v.value) for v in model.non_trainable_variables]
statistics = [np.asarray(v) for v in model.stateless_call(trained, start, images, training=True)[1]]


def predict(x):
    """Return the logits, f32[1, 1000], of an image, f32[1, 224, 224, 3]."""
    return model.stateless_call(trained, statistics, x, training=False)[0]


save(predict, images[:1])
