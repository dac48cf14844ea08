"""Write docs/api.md: what Python users call, from the docstrings. ``python docs/make_api.py``; a test compares."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# The title of a section, the file, and what of it: a function, or a class with its public methods.
SECTIONS = (
    ("Compiling and loading", [("aotc/pipeline.py", "compile"), ("aotc/bundle.py", "Bundle"),
                               ("aotc/recompile.py", "upgrade"), ("aotc/vmfb/module.py", "load")]),
    ("A module", [("aotc/vmfb/module.py", "LoadedModule"), ("aotc/vmfb/api/module_state.py", "ModuleState")]),
    ("Its functions", [("aotc/vmfb/api/entry.py", "Entry"), ("aotc/vmfb/api/submit_entry.py", "Submitting"),
                       ("aotc/vmfb/arguments.py", "Signature"), ("aotc/vmfb/arguments.py", "TensorSpec")]),
    ("Bound weights and states", [("aotc/vmfb/api/bound.py", "Bound"), ("aotc/vmfb/api/state.py", "KeptState"),
                                  ("aotc/vmfb/api/state_call.py", "StateCall")]),
    ("Calls that run later", [("aotc/vmfb/submit/fence.py", "Fence"),
                              ("aotc/vmfb/submit/fence.py", "FenceResult")]),
    ("Sharded models", [("aotc/vmfb/weights/shards.py", "shard_weights"),
                        ("aotc/vmfb/gang/gang.py", "gang"), ("aotc/vmfb/gang/gang.py", "Gang"),
                        ("aotc/vmfb/ranks/ranks.py", "Ranks")]),
    ("Arrays on devices, custom calls", [("aotc/vmfb/devices/array.py", "DeviceArray"),
                                         ("aotc/vmfb/custom_calls.py", "register_custom_call")]),
    ("Errors", [("aotc/vmfb/errors.py", "Error"), ("aotc/diagnostics.py", "CompileError"),
                ("aotc/diagnostics.py", "InternalError"), ("aotc/vmfb/errors.py", "BundleError"),
                ("aotc/vmfb/errors.py", "BundleNotFoundError"), ("aotc/vmfb/errors.py", "CallError"),
                ("aotc/vmfb/errors.py", "ArgumentError"), ("aotc/vmfb/errors.py", "ArgumentValueError"),
                ("aotc/vmfb/errors.py", "FenceCancelled"), ("aotc/vmfb/errors.py", "DeadlineExceeded"),
                ("aotc/vmfb/errors.py", "RankLost"), ("aotc/diagnostics.py", "AotcWarning")]),
    ("Looking at a bundle", [("aotc/tools/inspect.py", "inspect"), ("aotc/tools/inspect.py", "Inspection"),
                             ("aotc/tools/inspect.py", "InspectedVariant"), ("aotc/tools/inspect.py", "KernelTime"),
                             ("aotc/tools/inspect.py", "InspectedKernel"),
                             ("aotc/tools/inspect.py", "InspectedBuffer"),
                             ("aotc/tools/inspect.py", "InspectedSegment")]),
    ("Tuning", [("aotc/tools/tune.py", "tune"), ("aotc/tools/tune.py", "TuneSettings"),
                ("aotc/tools/tune.py", "TuneResult"), ("aotc/tools/tune.py", "TuningTrial"),
                ("aotc/lowering/tuning.py", "Choice")]),
    ("Comparing bundles", [("aotc/tools/page/compare.py", "diff"), ("aotc/tools/page/compare.py", "BundleDiff"),
                           ("aotc/tools/page/compare.py", "DiffFact"), ("aotc/tools/page/compare.py", "DiffFigure"),
                           ("aotc/tools/page/compare.py", "DiffWeight"),
                           ("aotc/tools/page/compare.py", "DiffKernel")]),
    ("What compiles", [("aotc/tools/lint.py", "lint"), ("aotc/tools/lint.py", "LintResult"),
                       ("aotc/tools/lint.py", "LintReport"), ("aotc/tools/lint.py", "LintRow")]),
    ("Checking a model", [("aotc/tools/check_model.py", "check"), ("aotc/tools/check.py", "CheckReport"),
                          ("aotc/tools/check.py", "Difference"), ("aotc/tools/agreement.py", "Mismatch"),
                          ("aotc/tools/largest_error.py", "LargestError"), ("aotc/tools/agreement.py", "Tolerance")]),
    ("Measuring a bundle", [("aotc/tools/bench.py", "bench"), ("aotc/tools/bench.py", "BenchSettings"),
                            ("aotc/tools/bench.py", "BenchResult"), ("aotc/tools/bench.py", "BenchedBundle"),
                            ("aotc/tools/bench.py", "Throughput")]),
    ("Reasons of the compiler", [("aotc/tools/explain/explain.py", "explain"),
                                 ("aotc/tools/explain/affinity.py", "AffinityReport"),
                                 ("aotc/tools/explain/affinity.py", "AffinityRow"),
                                 ("aotc/tools/explain/fusion.py", "FusionReport"),
                                 ("aotc/tools/explain/fusion.py", "FusionRegion"),
                                 ("aotc/tools/explain/fusion.py", "FusionNeighbour"),
                                 ("aotc/tools/explain/fusion.py", "FusionRow"),
                                 ("aotc/tools/explain/schedule.py", "ScheduleReport"),
                                 ("aotc/tools/explain/schedule.py", "ScheduleRow"),
                                 ("aotc/tools/explain/memory.py", "MemoryReport"),
                                 ("aotc/tools/live_values.py", "MemoryRow")]),
    ("Times of kernels", [("aotc/tools/profile.py", "profile"), ("aotc/tools/profile.py", "ProfileResult"),
                          ("aotc/tools/profile.py", "ProfiledKernel")]),
    ("A page about a bundle", [("aotc/tools/page/build.py", "report"), ("aotc/tools/page/build.py", "BundleReport")]),
    ("Options of `compile`", [("aotc/options.py", "Options")]),
)  # fmt: skip

# Names that other packages of the project use, and users do not, of classes without ``public_names``.
NOT_FOR_USERS = frozenset({"begin", "end", "value", "take", "filled", "follow", "advance", "at", "render"})
_SPECIAL = frozenset({"__call__", "__getitem__", "__setitem__"})


def page() -> str:
    """Return the page."""
    parts = ["# The Python API\n", "<!-- Written by `python docs/make_api.py` from the docstrings; do not edit. -->\n"]
    for title, rows in SECTIONS:
        parts.append(f"## {title}\n")
        for file, name in rows:
            node = _definition(file, name)
            parts += _described(node)
    return "\n".join(parts)


def _definition(file: str, name: str) -> ast.AST:
    """Return the definition of a name; of an overloaded function the last one, which has the docstring."""
    return [n for n in ast.parse((ROOT / file).read_text()).body if getattr(n, "name", "") == name][-1]


def _described(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef):
        return [f"### `aotc.{node.name}({_arguments(node)})`\n", _text(node)]
    assert isinstance(node, ast.ClassDef)
    parts = [f"### {node.name}\n", _text(node)]
    shown = _public_names(node)
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and _is_told(method, shown):
            kind = "await " * isinstance(method, ast.AsyncFunctionDef)
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
            call = "" if is_property else f"({_arguments(method)})"
            parts += [f"#### `{kind}{node.name}.{method.name}{call}`\n", _text(method)]
    return parts


def _public_names(node: ast.ClassDef) -> set[str]:
    """Return the names that the decorator ``public_names`` gives; empty without it."""
    calls = [d for d in node.decorator_list if isinstance(d, ast.Call) and ast.unparse(d.func) == "public_names"]
    return {ast.literal_eval(argument) for call in calls for argument in call.args}


def _is_told(method: ast.FunctionDef | ast.AsyncFunctionDef, shown: set[str]) -> bool:
    if method.name not in _SPECIAL:
        hidden = method.name not in shown if shown else method.name in NOT_FOR_USERS
        if hidden or method.name.startswith("_"):
            return False
    return bool(ast.get_docstring(method))


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return the arguments of a function without their types."""
    bare = ast.parse(ast.unparse(node)).body[0]
    assert isinstance(bare, ast.FunctionDef | ast.AsyncFunctionDef)
    every = bare.args
    if every.args and every.args[0].arg == "self":
        del every.args[0]
    for argument in (*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg):
        if argument is not None:
            argument.annotation = None
    return ast.unparse(every)


def _text(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return a docstring as Markdown: its sections as lists, roles as code."""
    lines, found, listed = (ast.get_docstring(node) or "").split("\n"), [], False
    for n, line in enumerate(lines):
        if n + 1 < len(lines) and set(lines[n + 1]) == {"-"}:
            found.append(f"**{line}**\n")
            listed = True
        elif set(line) != {"-"} or not line:
            is_row = listed and line and not line.startswith(" ")
            found.append(f"- `{line}`" if is_row else line)
    text = "\n".join(found)
    for role in (":meth:", ":class:", ":func:", ":mod:", ":data:"):
        text = text.replace(f"{role}`~", "`").replace(f"{role}`", "`")
    return text.replace("``", "`") + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page())
