"""A check for cancellation keeps no frame, and so no array, of its caller alive."""

import asyncio  # noqa: F401  with asyncio imported, the check looks at the frames above it
import gc
import sys
import weakref

import numpy as np
import pytest

from aotc.vmfb.host.interruption import raise_if_interrupted

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("pools", [False, True])
def test_a_check_for_cancellation_keeps_no_frame_alive(monkeypatch, pools):
    if pools:
        import concurrent.futures.thread  # noqa: F401
    else:
        monkeypatch.delitem(sys.modules, "concurrent.futures.thread", raising=False)

    def call():
        x = np.zeros(3)
        raise_if_interrupted()
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()
