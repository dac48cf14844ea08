"""Write the models of the PyTorch tutorial as exports of JAX, with PyTorch's answers: ``make torch-models``.

The models come from the snippets of ``docs/tutorials/pytorch.md`` themselves. PyTorch and torchax are too large for the
test environment; with these files the tests compile the models of that page without them.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

PAGE = Path(__file__).parents[3] / "docs" / "tutorials" / "pytorch.md"
SNIPPET = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
ROWS = 5


def main(folder: Path) -> None:
    """Run the snippets of the page and write ``classifier.jaxexp``, ``classifier_batch.jaxexp`` and ``answers.npz``."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as work:
        os.chdir(work)
        for number, code in enumerate(SNIPPET.findall(PAGE.read_text())):
            exec(compile(code, f"snippet {number}", "exec"), scope)
            if "extract_jax" in code:
                one = _exported(partial(_called, scope["function"], scope["weights"]), scope["image"].numpy())
        os.chdir(folder)
    many = _exported(lambda image: _called(scope["function"], scope["weights"], image)[0], scope["example"])
    images = torch.rand(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        answers = {name: scope["model"](x).numpy() for name, x in (("answer", scope["image"]), ("answers", images))}
    (folder / "classifier.jaxexp").write_bytes(one)
    (folder / "classifier_batch.jaxexp").write_bytes(many)
    np.savez_compressed(folder / "answers.npz", image=scope["image"].numpy(), images=images.numpy(), **answers)


def _called(function: Any, weights: Any, image: Any) -> Any:
    return function(weights, (image,))


def _exported(function: Any, example: Any) -> bytes:
    return bytes(jax.export.export(jax.jit(function))(example).serialize())


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else Path(__file__).parent).resolve())
