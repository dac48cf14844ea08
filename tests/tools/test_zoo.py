"""Models of flax, equinox, keras and transformers, small: exported, compiled, loaded and served, beside ``jax.jit``.

In full, and timed: ``make zoo``.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import pytest

import aotc

sys.path.append(str(Path(__file__).parents[2]))

from examples.zoo.models import ZOO

pytestmark = pytest.mark.cpu

NEEDS = {
    "transformers (flax linen)": ("transformers", "flax"), "flax nnx": ("flax",), "equinox": ("equinox",),
    "keras.applications": ("keras",), "keras_hub": ("keras_hub",),
}  # fmt: skip
NAMES = {"FP32": "float32", "UINT32": "uint32"}


def built(name):
    """Return the small form of a model."""
    for package in NEEDS[ZOO[name].library]:
        if find_spec(package) is None:
            pytest.skip(f"it needs {package}: pip install '.[zoo]' && pip install --no-deps keras-hub")
    return ZOO[name].build(True)


def assert_agree(found, want):
    """Equal but for rounding, in the largest value of each leaf."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        theirs = np.asarray(theirs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max()
        assert np.abs(theirs).max() > 1e-3, "the weights drown the signal"


@pytest.mark.parametrize("name", ZOO)
def test_zoo_models_match_jax(name, tmp_path):
    model = built(name)
    jitted = jax.jit(model.function)
    path = tmp_path / f"{name}.jax"
    path.write_bytes(jax.export.export(jitted)(*model.inputs).serialize())
    bundle = tmp_path / f"{name}.vmfb"
    bundle.write_bytes(aotc.compile(path))
    assert_agree(aotc.load(bundle)(*model.inputs), jitted(*model.inputs))


def test_zoo_models_are_served(tmp_path):
    for package in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(package)
    from support.served import running

    models = {name: built(name) for name in ("mlp_mixer", "vae", "gru")}
    for name, model in models.items():
        (tmp_path / f"{name}.vmfb").write_bytes(aotc.compile(model.function, *model.inputs))
    with running(tmp_path) as server:
        for name, model in models.items():
            kinds = {dtype: kind for kind, dtype in NAMES.items()}
            arguments = server.json(f"/v2/models/{name}")[1]["inputs"]
            inputs = [
                {"name": a["name"], "shape": list(x.shape), "datatype": kinds[str(x.dtype)], "data": x.ravel().tolist()}
                for a, x in zip(arguments, model.inputs, strict=True)
            ]
            status, said = server.json(f"/v2/models/{name}/infer", {"inputs": inputs})
            assert status == 200, said
            found = [np.array(o["data"], NAMES[o["datatype"]]).reshape(o["shape"]) for o in said["outputs"]]
            assert_agree(found, jax.jit(model.function)(*model.inputs))
