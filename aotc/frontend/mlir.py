"""Read any form of a model and parse it to a verified MLIR module of jaxlib.

Accepted: StableHLO text (pretty or generic, since 2023), MLIR bytecode, VHLO portable artifacts, ``jax.export`` blobs,
a path to one of these, an ``Exported``, and jitted or plain functions with example arguments.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo
from jaxlib.mlir.passmanager import PassManager

from aotc.diagnostics import SHOWN_LINE, CompileError, Finding, Loc, shorten_message
from aotc.frontend import defer_interrupts
from aotc.frontend.contexts import make_context
from aotc.frontend.legalize import convert_mhlo, legalize_module
from aotc.frontend.mlir_types import discardable_integer
from aotc.frontend.model_text import (
    check_braces,
    check_characters,
    chlo_text,
    is_readable,
    is_text,
    modern_text,
    suspect_line,
)
from aotc.frontend.partition.partition import names_several_devices, partitioned
from aotc.frontend.platforms import NEEDS_SHARDINGS, fold_platform
from aotc.guard import guard
from aotc.options import Options
from aotc.source import reader_process

NO_KEYWORDS: Mapping[str, Any] = {}
_READ = (str, bytes, bytearray, memoryview, os.PathLike)
_BYTECODE_MAGIC = b"ML\xefR"
_FILE_LINE = re.compile(r'":(\d+):(\d+)')
_MISSING = re.compile(r"(?:unregistered operation|custom op) '((?:mhlo|chlo|stablehlo)\.\w+)' (?:found in|is unknown)")
_OPERAND = re.compile(r"operand #(\d+)")
_VALUE = re.compile(r"%[\w$.-]+(?!\s*=)(?![\w$.#-]*\s*=)")
_EXPORT = "jax.export.export(jax.jit(f))(*args).serialize() writes a model that can be read"
_CHECK_SIZES = "attributes without zero sizes: a replica_groups of tensor<0x1xi64> has no process"
_OTHER_FILES = {
    b"AOTCVMFB": ("a bundle, which is compiled already", "aotc run, aotc inspect or aotc dump"),
    b"\x93NUMPY": ("a NumPy array (.npy)", "the model here; arrays are for --input=@x.npy"),
    b"PK\x03\x04": ("a zip archive (.npz, .keras, .pt)", f"{_EXPORT}; a reproducer is for aotc compile"),
    b"HloModule": ("HLO text of XLA", "jax.jit(f).lower(*args).as_text(), which is StableHLO"),
}


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed model: the MLIR module, its context, and metadata.

    ``metadata`` is from jax.export: ``in_tree``, ``out_tree``, ``arg_names``, ``kept``, ``platforms``. ``path`` is the
    file, for messages.
    """

    context: ir.Context
    module: ir.Module
    path: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RawModel:
    """A model as read from its source, before parsing: text or bytes.

    ``values`` maps a function's name to the flat list of its example arguments. ``digest`` is the SHA-256 of the
    jax.export blob that contained ``data``, if that alone decides on the program. ``rewritten`` is ``data`` as the
    child process of :mod:`aotc.frontend.child_reader` parsed and wrote it; it is parsed instead of ``data`` if present.
    """

    data: str | bytes
    path: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    digest: bytes = b""
    rewritten: bytes = b""

    @property
    def code(self) -> str | bytes:
        """Return the text or bytecode to parse: ``rewritten`` if present.

        Damaged bytecode that MLIR reads without an error may still corrupt the memory of the process.
        """
        return self.rewritten or self.data


def fetch(source: Any, example_args: Sequence[Any] = (), example_kwargs: Mapping[str, Any] = NO_KEYWORDS) -> RawModel:
    """Read ``source`` as a model: a file is read, a function is exported for its example arguments.

    Raises
    ------
    CompileError
        If a file cannot be read, if JAX cannot export the function, or if the function raises.
    """
    with guard("while reading the model", Options()):
        return program_of_one_rank(_fetch_source(source, example_args, example_kwargs))


def fetch_whole(
    source: object, example_args: Sequence[Any] = (), example_kwargs: Mapping[str, Any] = NO_KEYWORDS
) -> RawModel:
    """Read a model as :func:`fetch` does, without partitioning a program for several devices."""
    with guard("while reading the model", Options()):
        return _fetch_source(source, example_args, example_kwargs)


def is_read(source: object) -> bool:
    """Return True if a model is text, bytes, a file or a fetched model, which JAX need not trace."""
    return isinstance(source, (RawModel, *_READ))


def program_of_one_rank(raw: RawModel) -> RawModel:
    """Partition a model for several devices into the program of one rank; return another model unchanged."""
    with _sharded_module(raw) as module:
        if module is None:
            return raw
        data, ranks = partitioned(module, raw.path, raw.metadata.get("axes", ()))
    metadata = {key: value for key, value in raw.metadata.items() if key not in ("devices", "axes")}
    return RawModel(data, raw.path, {**metadata, "ranks": ranks}, digest=raw.digest)


def is_for_several_devices(raw: RawModel) -> bool:
    """Return True if a model is for several devices and not yet partitioned."""
    with _sharded_module(raw) as module:
        return module is not None


def has_shardings(data: str | bytes) -> bool:
    """Return True if a model may have shardings: of Shardy's dialect, or of MHLO."""
    if isinstance(data, str):
        return "sdy." in data or "mhlo.sharding" in data
    if not data.startswith(_BYTECODE_MAGIC):
        return b"sdy." in data or b"mhlo.sharding" in data
    return b"sdy\0" in data or b"mhlo.sharding" in data  # a name in bytecode ends with 0; weights have any bytes


@contextmanager
def _sharded_module(raw: RawModel) -> Iterator[ir.Module | None]:
    """Yield the module of a model for several devices; None for any other model."""
    if "ranks" in raw.metadata or not has_shardings(raw.data):
        yield None
        return
    with make_context():
        try:
            module = parse_model(raw.code)
            upgrade_module(module)
        except (ir.MLIRError, ValueError):
            sharded = None  # the reader of the model reports the error
        else:
            sharded = module if names_several_devices(module, raw.metadata.get("devices", 0)) else None
        yield sharded


def _fetch_source(source: Any, example_args: Sequence[Any], example_kwargs: Mapping[str, Any]) -> RawModel:
    """Read a file, bytes or text, or trace a function, without partitioning."""
    if isinstance(source, RawModel):
        return source
    if any(kind.__module__.startswith("torch.nn.") for kind in type(source).__mro__):
        message = f"{type(source).__name__} is a PyTorch module, expected a function of JAX"
        hint = "weights, f = torchax.extract_jax(model), and compile lambda *args: f(weights, args)"
        raise CompileError.at(Loc(), message, hint=hint)
    if not isinstance(source, _READ):  # reading a model needs no JAX, whose import takes longer than a compilation
        with defer_interrupts():
            from aotc.frontend.jax_program import is_program, program_of

        if is_program(source):
            program = program_of(source, example_args, example_kwargs)
            return RawModel(program.data, "", program.metadata, {"main": program.values} if program.values else {})
    if (example_args or example_kwargs) and isinstance(source, _READ):
        more = len(example_args) + len(example_kwargs)
        message = f"a model that is read already contains its arguments; found {more} more"
        raise CompileError.at(Loc(), message, hint="aotc.compile(model) without examples")
    path = ""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and _is_path(source)):
        path = os.fspath(source)
        source = _read_file(path)
    if isinstance(source, str):
        check_characters(source)
        return try_in_child(RawModel(source, path))
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise CompileError.at(Loc(path), f"a model is text, bytes, a path or a function, not {type(source).__name__}")
    data = bytes(source)
    is_module = data.startswith(_BYTECODE_MAGIC) or is_text(data)
    return try_in_child(RawModel(data, path) if is_module else _model_of_export_blob(data, path))


# Bytes of bytecode up to which the child process returns the module it has read, to be parsed in place of the file. For
# larger models the additional copy would take too much memory.
MOST_REWRITTEN = 1 << 26


def try_in_child(raw: RawModel) -> RawModel:
    """Parse a model in a child process first if MLIR may crash on it: bytecode, and some text.

    Raises
    ------
    CompileError
        If the child crashed.
    """
    data = raw.data.encode() if isinstance(raw.data, str) else raw.data
    if data.startswith(_BYTECODE_MAGIC):
        place, memory, hint = Loc(raw.path), 0, f"{_EXPORT}; this file may be damaged"
    elif line := suspect_line(data):
        place, memory, hint = Loc(raw.path, line), reader_process.reader_memory_limit(data), _CHECK_SIZES
    else:
        return raw
    rewrite = data.startswith(_BYTECODE_MAGIC) and len(data) <= MOST_REWRITTEN
    read = reader_process.read_in_child(data, raw.path, raw.metadata, memory, rewrite)
    if read.problem:
        raise CompileError.at(place, f"the model cannot be read: {read.problem}", hint=hint)
    if rewrite and read.error:
        raise CompileError.at(place, read.error.rpartition("error: ")[2], hint=hint)
    return replace(raw, rewritten=read.module)


def read_source(
    raw: RawModel, platform: str = "cpu", legalize: bool = True, parsed: Callable[[ir.Module], None] | None = None,
    context: ir.Context | None = None,
) -> Source:  # fmt: skip
    """Parse and verify a model; ``platform`` selects the program of an export for several platforms.

    With ``legalize`` false, ops without an importer remain, for XLA. ``parsed`` is called with the module before any
    rewriting. Several models may share a ``context``.

    Raises
    ------
    CompileError
        If the model cannot be read, with MLIR's location.
    """
    if isinstance(raw.data, str) or not raw.data.startswith(_BYTECODE_MAGIC):
        check_braces(raw.data, raw.path)
    context = context or make_context()
    with context:
        try:
            module = parse_model(raw.code)
            upgrade_module(module)
            if not module.operation.verify():
                raise CompileError.at(Loc(raw.path), "the module does not verify")
        except ir.MLIRError as error:
            raise CompileError(_findings_of_mlir_error(error, raw.data, raw.path)) from None
        except ValueError as error:
            raise CompileError.at(Loc(raw.path), f"the model cannot be read: {error}") from None
        if parsed:
            parsed(module)
        if not any("ranks" in entry for entry in raw.metadata.get("entries", {"": raw.metadata}).values()):
            _check_partitions(module, raw.path)
        fold_platform(module, raw.metadata.get("platforms", ()), platform)
        try:
            convert_mhlo(module, raw.path)
            if legalize:
                legalize_module(module, raw.path)
        except ir.MLIRError as error:
            raise CompileError(_findings_of_mlir_error(error, "", "")) from None
    return Source(context, module, raw.path, raw.metadata)


def parse_model(data: str | bytes) -> ir.Module:
    """Parse text or bytecode in the current MLIR context.

    If a text does not parse, a second attempt rewrites list attributes of older StableHLO versions, and MHLO ops that
    jaxlib lacks.

    Raises
    ------
    ir.MLIRError
        The error of the second attempt, or of the first if there was nothing to rewrite.
    """
    try:
        return ir.Module.parse(data)
    except ir.MLIRError:
        text = "" if data[:4] == _BYTECODE_MAGIC else data if isinstance(data, str) else data.decode(errors="replace")
        modern = chlo_text(modern_text(text), ir.Context.current.is_registered_operation)
        if modern == text:
            raise
        return ir.Module.parse(modern)


def _is_path(text: str) -> bool:
    return "\n" not in text and "{" not in text and len(text) < 4096


def _read_file(path: str) -> bytes:
    """Return the bytes of a model file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise CompileError.at(Loc(path), f"cannot read the model: {error.strerror}") from None
    except ValueError as error:  # not a valid path
        raise CompileError.at(Loc(repr(path)), f"cannot read the model: {error}") from None


def _model_of_export_blob(data: bytes, path: str) -> RawModel:
    """Return the program of a ``jax.export`` blob, with its metadata."""
    if not data:
        raise CompileError.at(Loc(path), "the model is empty: 0 bytes", hint=_EXPORT)
    for head, (what, hint) in _OTHER_FILES.items():
        if data.startswith(head):
            raise CompileError.at(Loc(path), f"this is {what}, not a model", hint=hint)
    from aotc.frontend import from_jax
    from aotc.frontend.jax_program import program_of_export

    exported = from_jax.deserialize_exported(data)
    if exported is None and is_readable(data):
        return RawModel(data, path)  # MLIR's parser reports the error
    if exported is None:
        what = "neither StableHLO text, MLIR bytecode nor a jax.export blob, or it is damaged"
        raise CompileError.at(Loc(path), f"the model is {what}", hint=_EXPORT)
    try:
        program = program_of_export(exported)
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # trees and types of damaged blobs
        message = f"the blob of jax.export contradicts itself: {type(error).__name__}: {error}"
        raise CompileError.at(Loc(path), message, hint=f"{_EXPORT}; this file may be damaged") from None
    return RawModel(program.data, path, program.metadata, digest=sha256(data).digest())


def _check_partitions(module: ir.Module, path: str) -> None:
    """Reject a program that is partitioned over devices; the importers of collectives check replicas."""
    attributes = module.operation.attributes
    count = discardable_integer(attributes, "mhlo.num_partitions", 1, Loc(path))
    if count > 1:
        raise CompileError.at(Loc(path), f"the program needs several devices: it is for {count}", hint=NEEDS_SHARDINGS)


def upgrade_module(module: ir.Module) -> None:
    """Upgrade a portable artifact, with VHLO ops in the version of its writer, to StableHLO."""
    if any(op.operation.name.startswith("vhlo.") for op in module.body.operations):
        to_current = f"vhlo-to-version{{target={stablehlo.get_current_version()}}}"
        PassManager.parse(f"builtin.module({to_current},vhlo-legalize-to-stablehlo)").run(module.operation)


def _findings_of_mlir_error(error: ir.MLIRError, data: str | bytes, path: str) -> list[Finding]:
    """Convert MLIR's diagnostics to findings with locations, notes and hints."""
    text = "" if data[:4] == _BYTECODE_MAGIC else data if isinstance(data, str) else data.decode(errors="replace")
    lines = text.splitlines()
    hint = "" if text else f"{_EXPORT}; this file may be damaged"
    if text and not is_text(text.encode(errors="replace")):
        hint = f"StableHLO begins with module or func.func; {_EXPORT}"
    findings = []
    for diagnostic in error.error_diagnostics:
        notes = tuple(_finding_of_diagnostic(note, lines, path, "") for note in diagnostic.notes)
        notes = tuple(
            replace(note, message=shorten_message(note.message, SHOWN_LINE)) for note in notes
        )  # they quote ops
        missing = _MISSING.search(diagnostic.message)
        way_out = f"an op of StableHLO or CHLO: this jaxlib has no {missing[1]}" if missing else hint
        findings.append(replace(_finding_of_diagnostic(diagnostic, lines, path, way_out), notes=notes))
    return findings or [Finding(f"the model cannot be read: {str(error).splitlines()[0]}", Loc(path))]


def _finding_of_diagnostic(diagnostic: Any, lines: Sequence[str], path: str, hint: str) -> Finding:
    place = _FILE_LINE.search(str(diagnostic.location))  # jaxlib returns the base class, which has no line
    line, column = (int(place[1]), int(place[2])) if place else (0, 0)
    return finding_with_source_line(Finding(diagnostic.message, Loc(path, line, column), hint=hint), lines)


def finding_with_source_line(finding: Finding, lines: Sequence[str]) -> Finding:
    """Add the line of the model's text to ``finding``, with a caret under the operand that it numbers."""
    line, column = finding.loc.line, finding.loc.column
    if finding.snippet or not 0 < line <= len(lines):
        return finding
    at = max(column - 1, 0)
    if named := _OPERAND.search(finding.message):
        operands = [m.start() for m in _VALUE.finditer(lines[line - 1], at)]
        at = operands[int(named[1])] if int(named[1]) < len(operands) else at
    snippet, caret = _line_part_around(lines[line - 1], at)
    return replace(finding, snippet=snippet, caret=caret)


@contextmanager
def show_model_lines_in_errors(model: Any) -> Iterator[None]:
    """Add the line of the model's text to errors of the ``with`` block, if the model is text."""
    try:
        yield
    except CompileError as error:
        models = model if isinstance(model, Mapping) else {None: model}
        for name, one in models.items():
            if isinstance(one, RawModel):
                add_source_lines(error, one)
                continue
            is_path = isinstance(one, os.PathLike) or (isinstance(one, str) and _is_path(one))
            try:
                text = Path(one).read_bytes() if is_path else one
            except (OSError, ValueError):
                text = b""
            if isinstance(text, str | bytes):
                add_source_lines(error, RawModel(text, os.fspath(one) if is_path else name_of_model_text(name)))
        raise


def name_of_model_text(name: Any) -> str:
    """Return the name in messages of a model without a file; ``name`` is its name if there are several models."""
    return "" if name is None else f"<{name}>"


def add_source_lines(error: CompileError, raw: RawModel) -> None:
    """Add the line of the model's text to the findings of ``error``."""
    code = raw.data.encode(errors="replace") if isinstance(raw.data, str) else bytes(raw.data)
    if is_readable(code):
        lines = code.decode().splitlines()
        error.findings = [finding_with_source_line(f, lines) if f.loc.path == raw.path else f for f in error.findings]


def _line_part_around(line: str, at: int) -> tuple[str, int]:
    """Return the part of a line around column ``at`` that fits a terminal, and the column within that part."""
    start = max(0, at - SHOWN_LINE // 2)
    part = line[start : start + SHOWN_LINE].rstrip()
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in part).lstrip()
    return shown, min(max(0, at - start - (len(part) - len(shown))), len(shown))
