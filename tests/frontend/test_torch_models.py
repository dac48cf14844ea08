"""The models of the PyTorch tutorial: from files without PyTorch, and anew with it (``make test-torch``)."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu
INPUTS = Path(__file__).parents[1] / "inputs" / "torch"
PAGE = (Path(__file__).parents[2] / "docs" / "tutorials" / "pytorch.md").read_text()
NEEDS_TORCH = [
    pytest.mark.torch,
    pytest.mark.skipif(not (find_spec("torch") and find_spec("torchax")), reason="needs torch and torchax"),
]


@pytest.fixture(params=["stored", pytest.param("anew", marks=NEEDS_TORCH)], scope="module")
def folder(request, tmp_path_factory):
    """A folder with the models of the page and PyTorch's answers: the one in this repository, or a new one."""
    if request.param == "stored":
        return INPUTS
    made = tmp_path_factory.mktemp("torch")
    subprocess.run([sys.executable, INPUTS / "make.py", made], check=True)
    return made


def shown(name):
    """Return the signature that the page shows for the model."""
    return re.findall(r"^main\(.*\) -> \(.*\)$", PAGE, re.MULTILINE)[["classifier", "classifier_batch"].index(name)]


@pytest.mark.parametrize(
    ("name", "given", "wanted"), [("classifier", "image", "answer"), ("classifier_batch", "images", "answers")]
)
def test_a_torch_model_gives_the_results_of_torch(folder, tmp_path, name, given, wanted):
    arrays = np.load(folder / "answers.npz")
    bundle = aotc.compile(folder / f"{name}.jaxexp", output=tmp_path / "m.vmfb")
    assert str(bundle.functions["main"]) == shown(name)
    found = aotc.load(tmp_path / "m.vmfb")(arrays[given])
    assert found.shape == arrays[wanted].shape
    np.testing.assert_allclose(found, arrays[wanted], atol=1e-5)


def test_a_torch_model_has_a_symbolic_batch(folder):
    module = aotc.compile(folder / "classifier_batch.jaxexp").load()
    arrays = np.load(folder / "answers.npz")
    for rows in (1, 2, 4):
        np.testing.assert_allclose(module(arrays["images"][:rows]), arrays["answers"][:rows], atol=1e-5)
    np.testing.assert_allclose(module(arrays["image"]), arrays["answer"], atol=1e-5)


def test_a_torch_module_is_refused_with_a_hint():
    base = type("Module", (), {"__module__": "torch.nn.modules.module", "__call__": lambda self, x: x})
    net = type("Net", (base,), {"__module__": "__main__"})()
    with pytest.raises(aotc.CompileError, match=r"(?s)Net is a PyTorch module.*torchax\.extract_jax"):
        aotc.compile(net, np.ones(3, np.float32))


@pytest.mark.torch
@pytest.mark.skipif(NEEDS_TORCH[1].args[0], reason="needs torch and torchax")
def test_calls_accept_torch_tensors():
    import torch

    arrays = np.load(INPUTS / "answers.npz")
    module = aotc.compile(INPUTS / "classifier.jaxexp").load()
    np.testing.assert_allclose(module(torch.from_numpy(arrays["image"])), arrays["answer"], atol=1e-5)
