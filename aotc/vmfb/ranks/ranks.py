"""Configuration of a process as one of several ranks: its number, their count, and the rendezvous address."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from aotc.vmfb.errors import ArgumentValueError

TRANSPORTS = ("tcp", "mpi", "threads")
NCCL, HOST = "nccl", "host"
GPU_TRANSPORTS = (NCCL, HOST)


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among those that run a sharded model together.

    Parameters
    ----------
    rank, size : int
        Number of this process, from 0, and the number of all.
    address : str
        ``host:port`` where rank 0 listens and the others connect; for ``tcp``.
    transport : str
        ``tcp``, ``mpi`` or ``threads``. By default MPI if its launcher started this process, else TCP.
    timeout : float
        Seconds to wait at start until all ranks are there.
    local_rank : int
        Number of this process among those of its host, which chooses its GPU; by default the rank.
    gpus : str
        Transport of arrays between GPUs: ``nccl``, or ``host`` for host memory and ``transport``. The default is
        ``AOTC_RANKS_GPUS``, or else NCCL if it is installed.

    Raises
    ------
    ArgumentValueError
        If a value is not in its range.
    """

    rank: int
    size: int
    address: str = ""
    transport: str = ""
    timeout: float = 30.0
    local_rank: int = -1
    gpus: str = ""

    def __post_init__(self) -> None:
        """Validate all fields."""
        for name in ("rank", "size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ArgumentValueError("Ranks", f"{name} is not an integer", repr(value))
        if self.size < 1:
            raise ArgumentValueError("Ranks", "size must be positive", self.size)
        if not 0 <= self.rank < self.size:
            raise ArgumentValueError("Ranks", "the rank is out of range", self.rank, f"0 to {self.size - 1}")
        if self.transport and self.transport not in TRANSPORTS:
            raise ArgumentValueError("Ranks", "unknown transport", repr(self.transport), ", ".join(TRANSPORTS))
        if self.gpus and self.gpus not in GPU_TRANSPORTS:
            expected = ", ".join(GPU_TRANSPORTS)
            raise ArgumentValueError("Ranks", "unknown GPU transport", repr(self.gpus), expected)
        if not self.timeout > 0:
            raise ArgumentValueError("Ranks", "timeout must be positive", self.timeout)
        if not isinstance(self.local_rank, int) or self.local_rank < -1:
            raise ArgumentValueError("Ranks", "local_rank must be -1 or more", repr(self.local_rank))
        if self.address:
            split_address(self.address)


def split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of ``host:port``; the host may be an IPv6 address in brackets.

    Raises
    ------
    ArgumentValueError
        If it has another form.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ArgumentValueError("Ranks", "the address is not host:port", repr(address), "for example node1:29500")
    return host, int(port)


def _torchrun_address(environ: Mapping[str, str]) -> str:
    """Return the rendezvous address: torchrun's own, with the next port if torchrun's agent occupies its port."""
    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port:
        return ""
    number = _integer("MASTER_PORT", port)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        number += 1 if number < (1 << 16) - 1 else -1
    return f"{_bracketed(host)}:{number}"


def _slurm_address(environ: Mapping[str, str]) -> str:
    """Return an address on the first host of a Slurm step; the port depends on the job, below Linux's client ports."""
    host = first_host(environ["SLURM_STEP_NODELIST"])
    job, step = (_integer(n, environ.get(n, "0")) for n in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"{host}:{_FIRST_PORT + (job * 31 + step) % _PORTS}"


def _no_address(environ: Mapping[str, str]) -> str:
    return ""


_FIRST_PORT, _PORTS = 15_000, 15_000


class _Launcher(NamedTuple):
    """A launcher's environment variables, and its transport.

    The variables are the rank, the size (the first that is set), others that must be set, and the rank on its host.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    needs: tuple[str, ...]
    address: Callable[[Mapping[str, str]], str]
    transport: str
    local_rank: str


# The first row whose variables are set counts: mpirun inside of a Slurm job sets both families.
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", ("WORLD_SIZE",), ("MASTER_ADDR",), _torchrun_address, "tcp", "LOCAL_RANK"),
    _Launcher(
        "Open MPI", "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), (), _no_address, "mpi",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    _Launcher("PMI", "PMI_RANK", ("PMI_SIZE",), (), _no_address, "mpi", "MPI_LOCALRANKID"),
    # A batch script outside of srun has SLURM_PROCID and SLURM_NTASKS, but it is one process and not a step.
    _Launcher(
        "Slurm", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ("SLURM_STEP_NODELIST",), _slurm_address,
        "tcp", "SLURM_LOCALID",
    ),
)  # fmt: skip


def ranks_from_environment(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Return the ranks that a launcher has set in the environment, or None.

    ``AOTC_RANKS_ADDRESS`` replaces the address of the launcher, and selects TCP.

    Raises
    ------
    ArgumentValueError
        If a variable has no valid value; the message names it.
    """
    for row in _LAUNCHERS:
        size = next((name for name in row.size if environ.get(name)), None)
        if size is None or not environ.get(row.rank) or not all(environ.get(name) for name in row.needs):
            continue
        number, count = _integer(row.rank, environ[row.rank]), _integer(size, environ[size])
        if count < 1:
            raise ArgumentValueError(size, f"{row.name} set the number of ranks", count, "a positive number")
        if number >= count:
            raise ArgumentValueError(
                row.rank, f"{row.name} set a rank that is out of range", number, f"0 to {count - 1} by {size}"
            )
        address = environ.get("AOTC_RANKS_ADDRESS", "")
        local = _integer(row.local_rank, environ[row.local_rank]) if environ.get(row.local_rank) else -1
        return Ranks(
            number, count, address or row.address(environ), "tcp" if address else row.transport, local_rank=local
        )
    return None


def _integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ArgumentValueError(name, "the environment variable is not a number", repr(text))
    return int(text)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def first_host(hosts: str) -> str:
    """Return the first host of a Slurm node list, such as ``rack[2-4]n[07,9],login``.

    Raises
    ------
    ArgumentValueError
        If the list has no host.
    """
    first = re.match(r"(?:[^,\[\]]|\[[0-9,-]+\])+", hosts)
    if first is None:
        raise ArgumentValueError("SLURM_STEP_NODELIST", "the list has no host", repr(hosts))
    return re.sub(r"\[([0-9]+)[0-9,-]*\]", r"\1", first.group())
