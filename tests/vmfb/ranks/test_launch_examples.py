"""The examples of Slurm and Kubernetes: processes with the variables that these launchers set."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.small_sharded import bundle, expected

yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.cpu

EXAMPLES = Path(__file__).parents[3] / "examples" / "sharded"


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return str(sock.getsockname()[1])


def run_ranks(tmp_path, environments):
    """Run the example as a process for each environment; return what they print."""
    bundle(2).save(tmp_path / "model.vmfb")
    command = [sys.executable, str(EXAMPLES / "rank.py"), str(tmp_path / "model.vmfb")]
    common = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(command, env={**common, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for env in environments
    ]
    outcomes = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outcomes
    return [text for text, _ in outcomes]


def check_sums(texts):
    ones = {"w1": np.ones((16, 32), "f4"), "w2": np.ones((32, 16), "f4")}, np.ones((8, 16), "f4"), np.float32(1)
    y = expected(*ones)["y"]  # whole on each rank
    for rank, text in enumerate(texts):
        assert text.startswith(f"rank {rank} of 2: ")
        assert f"{y.sum(dtype=np.float64):.6g}" in text.split()


def test_a_job_of_kubernetes(tmp_path):
    service, job = yaml.safe_load_all((EXAMPLES / "job.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    (container,) = spec["containers"]
    given = {row["name"]: row.get("value", "") for row in container["env"]}
    assert given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{spec['subdomain']}"
    assert int(given["WORLD_SIZE"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    here = {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    check_sums(run_ranks(tmp_path, [{**here, "RANK": str(rank)} for rank in range(2)]))


def test_a_job_of_slurm(tmp_path):
    text = (EXAMPLES / "job.sbatch").read_text()
    assert re.search(r"^srun python rank.py model.vmfb", text, re.MULTILINE)
    step = {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0",
    }  # fmt: skip
    check_sums(run_ranks(tmp_path, [{**step, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(2)]))
