"""torch on the GPU: its arrays, and replays of its graphs, which measure cuBLASLt and cuDNN."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.peers import available
from benchmarks.timing import Call, back_to_back


def installed() -> bool:
    """Return True if torch is installed; report how to install it otherwise."""
    return available("torch", "torch")


def to_torch(a: Any) -> Any:
    """Convert an array to a torch tensor on the GPU."""
    import torch

    a = np.ascontiguousarray(a)
    named = {ml_dtypes.bfloat16: (np.int16, torch.bfloat16), ml_dtypes.float8_e4m3fn: (np.int8, torch.float8_e4m3fn)}
    bits, kind = named.get(a.dtype.type, (a.dtype, None))
    there = torch.from_numpy(a.view(bits)).cuda()
    return there if kind is None else there.view(kind)


def time_torch_graph(run: Call) -> float:
    """Capture ``run`` as torch's CUDA graph, and return the seconds of a replay."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return back_to_back(graph.replay, torch.cuda.synchronize)
