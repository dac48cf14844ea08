"""The engines that aotc is compared with; each is optional.

``jax_jit`` and ``torch_gpu`` run in the process of a suite. The others (``xla``, ``aotc``, ``iree``, ``onnxruntime``,
``openvino``) are adapters of ``python -m benchmarks models engines``, which runs each in a process of its own.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def available(module: str, install: str) -> bool:
    """Return True if a package is installed; report on standard error how to install it otherwise."""
    if find_spec(module):
        return True
    print(f"{module} is left out: it is not installed here; pip install {install}", file=sys.stderr)
    return False
