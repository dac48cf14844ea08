"""How long a call goes on before the host has the word again."""

import ctypes
import time
from pathlib import Path

import numpy as np
import pytest
from kernels.executor.test_executor import STRIDE, Command, Executor, aligned, graph, loop, pointer

from aotc.kernels.cpu.executor.cancel import HOST_SHARE, LONGEST_SILENCE
from aotc.vmfb import abi

pytestmark = pytest.mark.cpu
SLOW = 2 * LONGEST_SILENCE // HOST_SHARE / 1e9  # seconds of a word that alone asks for a longer silence
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class Host:
    """What the executor calls of a host: its first word comes late, and it ends a call when ``ends`` is set."""

    def __init__(self, pool: np.ndarray) -> None:
        self.words, self.ends = 0, False
        calls = {
            abi.POOL_RELEASE: lambda state: 0, abi.POOL_REGAIN: self.regain, abi.POOL_NOTICE: self.notice,
            abi.POOL_DROP: lambda answer: 0,
        }  # fmt: skip
        self._kept = {word: CALLBACK(function) for word, function in calls.items()}
        for word, function in self._kept.items():
            pool[word] = ctypes.cast(function, ctypes.c_void_p).value

    def regain(self, state: int) -> int:
        if not self.words:
            time.sleep(SLOW)
        return 0

    def notice(self, argument: int) -> int:
        self.words += 1
        return 0 if self.ends else 1


def test_one_slow_host_callback_does_not_prevent_cancellation(tmp_path: Path) -> None:
    """Nor a later one of the same plan, which goes by what the earlier one learned."""
    executor = Executor(tmp_path / "executor.so")
    host = Host(executor.pool)
    counter, flag = np.array([200_000]), np.zeros(1, np.int8)
    down = graph([Command(1, [(0, 0), (1, 0)], [])], serial=1)
    code = executor.prepare(loop(down, down, 1), 2, 1)
    table, params, scratch = (np.array(x, np.int64) for x in ([counter.ctypes.data, flag.ctypes.data], [0], [0]))
    cells, block = aligned(abi.STATE_WORDS), aligned(abi.CALL_WORDS)
    parts = {
        abi.CALL_POOL: executor.pool, abi.CALL_SLOTS: table, abi.CALL_PARAMS: params, abi.CALL_CELLS: cells,
        abi.CALL_SCRATCH: scratch, abi.CALL_CODE: code,
    }  # fmt: skip
    for word, array in parts.items():
        block[word] = array.ctypes.data
    block[abi.CALL_STRIDE], block[abi.CALL_LENGTH], block[abi.CALL_THREADS] = STRIDE, len(code), 1
    block[abi.CALL_EVERY] = 1
    assert executor.library.aotc_run(pointer(block)) == 0
    assert host.words > 0
    assert 1 < block[abi.CALL_PERIOD] <= LONGEST_SILENCE
    host.ends, counter[0] = True, 1 << 50
    assert executor.library.aotc_run(pointer(block)) == 1
    executor.library.aotc_pool_stop(pointer(executor.pool))
