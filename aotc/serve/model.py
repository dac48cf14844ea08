"""A loaded version of a model, with the protocol's names for its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from errno import ESTALE
from functools import partial
from time import time
from typing import Any

import numpy as np

from aotc.serve.batching import Batcher, batch_dim_symbol, reason_rows_depend
from aotc.serve.errors import BAD, NOT_FOUND, RequestFault
from aotc.serve.gang_module import GangModule
from aotc.serve.generate.batched_decoder import Decoder
from aotc.serve.generate.capabilities import check_functions
from aotc.serve.generate.gang_decoder import GangDecoder, check_gang_functions
from aotc.serve.limits import SPARE_TENSORS
from aotc.serve.protocol import PLATFORM, InferRequest
from aotc.serve.settings import Settings
from aotc.serve.statistics import Statistics
from aotc.serve.tensors import datatype_of, unique_tensor_names
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.gang.gang import gang
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.limits import DISPATCHERS, MOST_DISPATCHERS
from aotc.vmfb.module import LoadedModule, load
from aotc.vmfb.results import NUMPY
from aotc.vmfb.submit.dispatcher_threads import PROCESS

GENERATE = "generate"
BACKEND = "aotc"
Variants = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FileStamp:
    """Identity, size and modification time of a file, to detect changes."""

    device: int
    inode: int
    size: int
    changed: int
    touched: int = field(compare=False)  # changes with name or mode too


class ServedFunction:
    """A function of a served model, with the protocol's names for inputs and outputs.

    Attributes
    ----------
    name : str
        Its name in the bundle.
    inputs, outputs : list of str
        The protocol's names.
    most_tensors : int
        Maximum number of inputs, or outputs, in a request.
    wanted : str
        The value of the option ``results`` for calls of the function.
    statistics : Statistics
        Statistics of its requests.
    batcher : Batcher or None
        Batches requests, if rows are independent and batching is enabled.
    """

    def __init__(
        self, module: LoadedModule | GangModule, name: str, settings: Settings, variants: Variants
    ) -> None:
        signature = module.functions[name].signature
        self.module, self.name = module, name
        self.wanted = NUMPY if module.gpus else ""  # without GPUs the default is NumPy, and faster
        self.arguments, self.results = signature.arguments, signature.results
        self.inputs = unique_tensor_names(self.arguments, "input")
        self.outputs = unique_tensor_names(self.results, "output")
        self.statistics = Statistics()
        self.most_tensors = max(len(self.inputs), len(self.outputs)) + SPARE_TENSORS
        self.why_alone = "--max-batch is 1"
        self.batcher: Batcher | None = None
        if isinstance(module, GangModule):
            self.why_alone = "the sizes of a sharded model are fixed"
        elif settings.max_batch > 1:
            symbol = batch_dim_symbol(self.arguments, self.results)
            self.why_alone = "arguments and results need the same symbolic dim first, and nowhere else"
            if symbol:
                self.why_alone = reason_rows_depend(module, name, self.arguments, symbol)
            if not self.why_alone:
                sizes = _specialized_rows(variants, name, symbol) if settings.pad else set()
                self.batcher = Batcher(module, name, settings.max_batch, settings.max_delay, sorted(sizes))

    def arguments_of_request(self, request: InferRequest, where: str) -> list[np.ndarray]:
        """Return the arguments of the function from a request, in order.

        Raises
        ------
        RequestFault
            If an input is missing, unknown, or has the wrong type or shape, or an output is unknown.
        """
        given = request.inputs
        if given.keys() != set(self.inputs):
            missing, other = set(self.inputs) - given.keys(), given.keys() - set(self.inputs)
            what = f"no input {', '.join(sorted(missing))}" if missing else f"no argument {', '.join(sorted(other))}"
            found, expected = ", ".join(given)[:200], ", ".join(self.inputs)
            raise RequestFault(BAD, where, what[:200], found or "none", expected or "none")
        for name, _ in request.outputs or ():
            if name not in self.outputs:
                raise RequestFault(BAD, where, f"no output {name[:80]!r}", expected=", ".join(self.outputs))
        arrays = [given[name] for name in self.inputs]
        for name, array, row in zip(self.inputs, arrays, self.arguments):
            fits = len(array.shape) == len(row["dims"]) and all(
                isinstance(d, str) or d == n for d, n in zip(row["dims"], array.shape)
            )
            if not fits or from_numpy(array.dtype) != row["dtype"]:
                found = f"{datatype_of(from_numpy(array.dtype))} {list(array.shape)}"
                expected = f"{datatype_of(row['dtype'])} [{', '.join(map(str, row['dims']))}]"
                raise RequestFault(BAD, f"{where}: input {name!r}", "the tensor does not fit", found, expected)
        return arrays

    def metadata(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return inputs and outputs in the protocol's format; a symbolic size is -1."""
        return _described_tensors(self.inputs, self.arguments), _described_tensors(self.outputs, self.results)


class ServedModel:
    """A loaded version of a model.

    Parameters
    ----------
    name, version, path, settings
        The model, its version, its file, and the server's settings.
    stamp : FileStamp
        Identity of the file to load.
    inside : bool
        Refuse a file other than ``stamp``: a link may have replaced the file since the folder was scanned.

    Attributes
    ----------
    name, version : str, int
        The model and its version.
    functions : dict of str to ServedFunction
        Functions by their name in the bundle.
    decoder : Decoder or None
        Generates tokens, if the model has the functions for it.
    statistics : Statistics
        Statistics of generation requests.
    default : str
        The function for requests without a name; "" if there are several and none is ``main``.
    """

    def __init__(
        self, name: str, version: int, path: str, stamp: FileStamp, settings: Settings, inside: bool = False
    ) -> None:
        self.name, self.version, self.path, self.stamp = name, version, path, stamp
        bundle = open_bundle(path, settings.copy)
        if inside and bundle.file is not None and bundle.file.identity != (stamp.device, stamp.inode):
            raise OSError(ESTALE, "the file was replaced while it was opened", path)
        self.module = _started_module(name, path, bundle, settings)
        # Enough dispatchers for all requests of the queue, so that calls of one model never exhaust them for the
        # others.
        PROCESS.dispatchers.raise_thread_limit(settings.queue)
        self.loaded_at = time()
        manifest = bundle.manifest
        self._producer, self._targets = manifest["producer"], [v["target"] for v in manifest["variants"]]
        names, variants = self.module.functions, manifest["variants"]
        self.functions = {n: ServedFunction(self.module, n, settings, variants) for n in names}
        try:
            self.default = self.module.default_name()
        except CallError:
            self.default = ""
        self.statistics = Statistics()
        self.decoder = _decoder_of(self.module, name, settings)

    @property
    def is_ready(self) -> bool:
        """Return True unless the ranks of a sharded model are starting again."""
        return self.module.is_ready if isinstance(self.module, GangModule) else True

    def end_ranks(self) -> None:
        """End the processes of a sharded model; do nothing for other models."""
        if isinstance(self.module, GangModule):
            self.module.close()

    @property
    def generates(self) -> bool:
        """Return True if the model has the two functions for generation."""
        return self.decoder is not None

    def is_generation(self, function: str) -> bool:
        """Return True if a request with this function name is a generation request."""
        return self.generates and function not in self.functions and function == ("" if not self.default else GENERATE)

    def names(self) -> list[str]:
        """Return the function names that requests may use, "" for the default first."""
        others = [name for name in self.functions if name != self.default]
        first = [""] if self.default or self.generates else []
        return [*first, *others, *([GENERATE] if self.is_generation(GENERATE) else [])]

    def check_function(self, function: str) -> None:
        """Refuse a function name that requests cannot use.

        Raises
        ------
        RequestFault
            If there is no such function.
        """
        if not self.is_generation(function):
            self.function(function)

    def function(self, name: str) -> ServedFunction:
        """Return a function by name, or the default function for "".

        Raises
        ------
        RequestFault
            If there is no such function.
        """
        found = self.functions.get(name or self.default)
        if found is None:
            text = f"no function {name!r}" if name else "the model has no default function"
            names = ", ".join(f"{self.name}.{n}" for n in self.functions)
            hint = "generate, generate_stream, ModelStreamInfer" if self.is_generation(name) else ""
            raise RequestFault(NOT_FOUND, self.name, text, expected=names, hint=hint)
        return found

    def _decoding_description(self) -> str:
        """Describe how sequences are decoded; "" if the model does not generate."""
        if self.decoder is None:
            return ""
        why = self.decoder.why_alone
        return f"each sequence separately: {why}" if why else f"up to {self.decoder.most} sequences together"

    def report(self) -> dict[str, Any]:
        """Return the model's data for the status page."""
        stats = self.module.stats()
        kept = ("target", "threads", "kernels", "command_buffers", "constants_bytes", "memory", "recordings", "devices")
        return {
            "name": self.name, "version": self.version, "path": self.path, "bytes": self.stamp.size,
            "loaded_at": self.loaded_at, "generates": self._decoding_description(), "producer": self._producer,
            "targets": self._targets,
            "functions": [
                {
                    "name": f.name, "signature": repr(self.module.functions[f.name].signature),
                    "batch": f.batcher.most if f.batcher else 1, "why_alone": f.why_alone,
                    **f.statistics.page(),
                }
                for f in self.functions.values()
            ],
            "stats": {key: stats[key] for key in kept if key in stats},
        }  # fmt: skip


def _started_module(
    name: str, path: str, bundle: OpenedBundle, settings: Settings
) -> LoadedModule | GangModule:
    """Load a bundle; start the ranks of a sharded bundle, by default on this host.

    Raises
    ------
    BundleError
        If the bundle is not for the number of ranks in the settings.
    """
    keys = list(settings.trusted_keys) or None
    if "mesh" not in bundle.manifest and settings.ranks is None:
        return load(
            bundle, devices=settings.devices, threads=settings.threads, verify=settings.verify, copy=settings.copy,
            trusted_keys=keys, max_in_flight=most_calls(), weights=settings.weights,
        )  # fmt: skip
    if settings.devices is not None:
        what = "devices are chosen for a bundle of one device; each rank of a sharded one takes its own"
        raise BundleError(path, what, hint="leave out --device")
    weights = str(settings.weights) if settings.weights else None
    start = partial(
        settings.start_ranks or gang, path, ranks=settings.ranks, threads=settings.threads, verify=settings.verify,
        trusted_keys=keys, weights=weights,
    )  # fmt: skip
    return GangModule(name, start, bundle.manifest["variants"][0]["target"])


def _decoder_of(module: LoadedModule | GangModule, name: str, settings: Settings) -> Decoder | None:
    """Return the decoder of a model that generates, or None."""
    try:
        if isinstance(module, GangModule):
            check_gang_functions(module, name)
            return GangDecoder(module, name)
        check_functions(module, name)
    except RequestFault:
        return None
    return Decoder(module, name, settings.max_batch)


def most_calls() -> int:
    """Return the maximum number of concurrent calls of one model; further calls wait."""
    return min(max(DISPATCHERS, usable_cores()), MOST_DISPATCHERS)


def model_metadata(model: ServedModel, function: str, versions: Sequence[int]) -> dict[str, Any]:
    """Return the protocol's description of a model, or of one function of it."""
    if model.is_generation(function):
        inputs, outputs = (
            _integer_vector_descriptions(("tokens", -1), ("stop", -1)),
            _integer_vector_descriptions(("token", 1), ("index", 1)),
        )
    else:
        inputs, outputs = model.function(function).metadata()
    name = f"{model.name}.{function}" if function else model.name
    about: dict[str, Any] = {"name": name, "versions": [str(v) for v in versions], "platform": PLATFORM}
    return {**about, "inputs": inputs, "outputs": outputs}


def model_config(model: ServedModel, function: str, delay: float) -> dict[str, Any]:
    """Return Triton's configuration of a model, or of one of its functions; batched shapes omit the batch dim."""
    about = model_metadata(model, function, ())
    batcher = None if model.is_generation(function) else model.function(function).batcher
    config: dict[str, Any] = {"name": about["name"], "platform": PLATFORM, "backend": BACKEND, "max_batch_size": 0}
    for key in ("input", "output"):
        rows = [(row["name"], row["datatype"], row["shape"]) for row in about[f"{key}s"]]
        config[key] = [
            {"name": name, "data_type": _triton_type(datatype), "dims": shape[1:] if batcher else shape}
            for name, datatype, shape in rows
        ]
    if batcher is not None:
        config["max_batch_size"] = batcher.most
        config["dynamic_batching"] = {"max_queue_delay_microseconds": round(delay * 1e6)}
    config["model_transaction_policy"] = {"decoupled": model.is_generation(function)}
    return config


def _triton_type(datatype: str) -> str:
    return f"TYPE_{datatype}" if datatype.isupper() else "TYPE_INVALID"


def model_statistics(found: Sequence[tuple[ServedModel, str]]) -> list[dict[str, Any]]:
    """Return Triton's statistics of functions, each under the name that requests use."""
    rows = []
    for model, function in found:
        counted = model if model.is_generation(function) else model.function(function)
        name = f"{model.name}.{function}" if function else model.name
        rows.append(counted.statistics.report(name, model.version))
    return rows


def _integer_vector_descriptions(*names_and_sizes: tuple[str, int]) -> list[dict[str, Any]]:
    """Return the description of integer vectors."""
    return [{"name": name, "datatype": "INT64", "shape": [size]} for name, size in names_and_sizes]


def _described_tensors(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the protocol's description of arguments or results: name, datatype and shape."""
    return [
        {
            "name": name,
            "datatype": datatype_of(row["dtype"]),
            "shape": [d if isinstance(d, int) else -1 for d in row["dims"]],
        }
        for name, row in zip(names, rows)
    ]


def _specialized_rows(variants: Variants, function: str, symbol: str) -> set[int]:
    """Return the batch sizes for which a bundle has specialized code."""
    rows = [row for v in variants for row in v.get("specialized", {}).get(function, ())]
    return {row[symbol] for row in rows if symbol in row}
