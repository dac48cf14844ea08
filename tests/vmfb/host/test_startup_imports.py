"""The modules that a process imports up to its first results: each costs every start, so each has a row here."""

import json
import subprocess
import sys

import numpy as np
import pytest
from support import tiny

pytestmark = pytest.mark.ir

# Modules of aotc by the statement that may import them first.
AOTC = {
    "import aotc": {"aotc"},
    "aotc.load": {
        "aotc.vmfb", "aotc.vmfb.abi", "aotc.vmfb.api", "aotc.vmfb.api.entry",
        "aotc.vmfb.api.module_ranks", "aotc.vmfb.api.module_state", "aotc.vmfb.api.parameters", "aotc.vmfb.arguments",
        "aotc.vmfb.bundle", "aotc.vmfb.commands", "aotc.vmfb.device", "aotc.vmfb.devices",
        "aotc.vmfb.devices.array", "aotc.vmfb.verify.buffers", "aotc.vmfb.devices.cpu",
        "aotc.vmfb.devices.cpu.device", "aotc.vmfb.devices.cpu.native", "aotc.vmfb.dtypes",
        "aotc.vmfb.errors", "aotc.vmfb.host", "aotc.vmfb.host.digests",
        "aotc.vmfb.host.interruption", "aotc.vmfb.host.locks", "aotc.vmfb.host.logical_devices",
        "aotc.vmfb.host.machine", "aotc.vmfb.memory.mapped_file", "aotc.vmfb.host.release",
        "aotc.vmfb.host.shutdown", "aotc.vmfb.isa", "aotc.vmfb.limits", "aotc.vmfb.log", "aotc.vmfb.manifest",
        "aotc.vmfb.memory", "aotc.vmfb.memory.arena", "aotc.vmfb.memory.pointers",
        "aotc.vmfb.memory.result_pool", "aotc.vmfb.module", "aotc.vmfb.plan",
        "aotc.vmfb.public_names", "aotc.vmfb.ranks", "aotc.vmfb.ranks.layout", "aotc.vmfb.results", "aotc.vmfb.trees",
        "aotc.vmfb.verify", "aotc.vmfb.verify.call_memory", "aotc.vmfb.verify.elf",
        "aotc.vmfb.verify.kernel_interface", "aotc.vmfb.verify.program",
        "aotc.vmfb.verify.plan_recorder", "aotc.vmfb.verify.schema", "aotc.vmfb.verify.unpack",
        "aotc.vmfb.vm", "aotc.vmfb.weights", "aotc.vmfb.weights.constants",
    },
    "first call": set(),
    "submit": {
        "aotc.vmfb.call_limits", "aotc.vmfb.devices.early", "aotc.vmfb.submit", "aotc.vmfb.submit.call",
        "aotc.vmfb.submit.deadlines", "aotc.vmfb.submit.device_slots",
        "aotc.vmfb.submit.dispatcher_threads", "aotc.vmfb.submit.fence", "aotc.vmfb.submit.concurrency_limit",
        "aotc.vmfb.submit.memory_order", "aotc.vmfb.submit.stream_queue",
        "aotc.vmfb.submit.submission",
    },
}  # fmt: skip

# Packages besides aotc that NumPy has not imported yet. Private ones (``_sha2``) come with these or are builtin.
OTHERS = {
    "import aotc": {"__future__"},
    "aotc.load": {"atexit", "cython_runtime", "errno", "mmap", "msgpack"},  # cython_runtime: of msgpack's C code
    "first call": set(),
    "submit": {"heapq", "threading"},
}

SCRIPT = """
import json, sys
import numpy as np
seen, found = set(sys.modules), {}
x = np.arange(4, dtype=np.float32)

def note(step):
    found[step] = sorted(set(sys.modules) - seen)
    seen.update(sys.modules)

import aotc
note("import aotc")
module = aotc.load(sys.argv[1])
note("aotc.load")
made = module(x, x)
note("first call")
assert module.submit("main", x, x).result()[0].tolist() == made.tolist()
note("submit")
print(json.dumps([found, made.tolist()]))
"""


def test_each_step_imports_only_its_modules(tmp_path):
    path = tmp_path / "t.vmfb"
    path.write_bytes(tiny.bundle())
    done = subprocess.run([sys.executable, "-c", SCRIPT, path], capture_output=True, text=True, check=True)
    found, made = json.loads(done.stdout)
    np.testing.assert_array_equal(made, [0, 2, 4, 6])
    for step, names in found.items():
        own = {name for name in names if name.partition(".")[0] == "aotc"}
        tops = {name.partition(".")[0] for name in names} - {"aotc"}
        others = {name for name in tops if not name.startswith("_") or name == "__future__"}
        assert own == AOTC[step], f"{step}: edit the table only for what every process needs"
        assert others <= OTHERS[step], f"{step} imports {sorted(others - OTHERS[step])}"
