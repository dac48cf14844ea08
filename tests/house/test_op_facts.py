"""The op table is where facts about ops stand, and every op of it is complete."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from llvmlite import ir
from support.checklists.checklist import module
from support.checklists.checklist_all import CASES

from aotc.diagnostics import InternalError
from aotc.frontend.importer import import_model
from aotc.ir.opset import (
    CALLS,
    CONTROL_FLOW,
    EFFECTS,
    FAMILIES,
    LOOPED,
    MOVES,
    NEVER_NEGATIVE_ZERO,
    OPS,
    PARTIAL_WRITES,
    SCALARS,
    SELECTIONS,
    TILED_BY_COLUMNS,
)
from aotc.ir.opset.elementwise import result_dtype
from aotc.ir.tensor.ir import walk
from aotc.kernels.emit.scalar import emit_scalar_op, literal_register
from aotc.kernels.llvm_types import KernelModule
from aotc.pipeline import PASSES
from aotc.targets import TARGETS

pytestmark = pytest.mark.ir

ROOT = Path(__file__).parents[2]
DTYPE_OF_KIND = {"b": "i1", "i": "i32", "u": "u32", "f": "f32", "c": "c64"}

# --- a fact about an op is a column, not a set ---

OF_DIMS = {"max", "min"}  # functions of dims too, which are no ops


def collections(tree):
    """Yield what stands in each literal set, list or tuple, and the keys of each literal dict.

    A dict of functions is a dispatch table and ``__all__`` has names of Python's: both may say op names.
    """
    exempt = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and any(ast.unparse(t) == "__all__" for t in node.targets)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Set(elts=items) | ast.List(elts=items) | ast.Tuple(elts=items) if node not in exempt:
                yield node, items
            case ast.Dict(keys=keys, values=values) if not all(map(is_function, values)):
                yield node, keys


def is_function(node):
    """Can the node be a function, by its form?"""
    value = node.value if isinstance(node, ast.DictComp) else node
    return isinstance(value, ast.Name | ast.Attribute | ast.Lambda | ast.Call)


def test_collections_of_op_names_are_only_in_the_op_table():
    """Importers' tables pass since an op of StableHLO is written with its dialect there."""
    wrong = []
    for path in sources("aotc", "cli"):
        if path.is_relative_to(ROOT / "aotc" / "ir" / "opset"):
            continue
        for node, items in collections(ast.parse(path.read_text())):
            names = [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]
            if len(OPS.keys() & set(names) - OF_DIMS) >= 2:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:100]}")
    assert not wrong, "make it a column of the op table and a comprehension in aotc/ir/opset/__init__.py"


def test_named_sets_are_derived_from_the_table():
    tree = ast.parse((ROOT / "aotc" / "ir" / "opset" / "__init__.py").read_text())
    texts = [{i.value for i in items if isinstance(i, ast.Constant)} for _, items in collections(tree)]
    wrong = [sorted(found) for found in texts if len(OPS.keys() & found) >= 2 and found - FAMILIES.keys()]
    assert not wrong, "make it a column of the op table"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (LOOPED, {"reduce", "while"}),
        (NEVER_NEGATIVE_ZERO & OPS.keys(), {"abs", "exp"}),
        (PARTIAL_WRITES, {"dynamic_update_slice", "pad", "scatter"}),
        (SELECTIONS - MOVES, {"dynamic_update_slice", "select"}),
        (TILED_BY_COLUMNS, {"conv", "matmul"}),
    ],
    ids=["looped", "never negative zero", "partial writes", "selections", "tiled by columns"],
)
def test_rarely_used_op_columns_have_the_expected_ops(found, expected):
    assert found == expected


@pytest.mark.parametrize("folder", ["aotc/ir/opset", "aotc/frontend/importers"])
def test_files_are_named_by_families(folder):
    for path in (ROOT / folder).glob("[!_]*.py"):
        family = path.stem.partition("_")[0]
        general = path.stem in ("spec", "table", "dim_attributes")  # of all families
        assert family in FAMILIES or general, f"{path.stem}: expected {', '.join(FAMILIES)}"


# --- every op is complete ---


def sources(*folders):
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


@cache
def said_in(*folders):
    """Return every text constant in the files of ``folders``."""
    trees = [ast.parse(p.read_text()) for p in sources(*folders)]
    return {n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@cache
def imported_by_checklist():
    """Return the ops that the modules of ``tests/support/checklist*.py`` become, which run beside an oracle."""
    models = [import_model(module(*case)) for cases in CASES.values() for case in cases]
    return {op.name for m in models for f in m.functions.values() for op in walk(f.body)}


@cache
def in_golden_cases():
    """Return the words of the golden cases, which are run before and after their pass."""
    return {w for p in (ROOT / "tests" / "golden").rglob("*.txt") for w in re.findall(r"\w+", p.read_text())}


@cache
def documented():
    """Return the words in backquotes of the document of the tensor IR."""
    quoted = re.findall(r"`([^`]*)`", (ROOT / "docs" / "tensor_ir.md").read_text())
    return set(re.findall(r"[a-z_0-9]+", " ".join(quoted)))


INTEGERS = "aotc/kernels/emit/integer.py"
EMITTERS = {
    "f": "aotc/kernels/emit/real.py or aotc/kernels/formulas/math.py",
    "c": "aotc/kernels/formulas/complex.py",
}


def emission(name, kind):
    """Return what is wrong with the code of a scalar op on operands of ``kind``, or the empty string."""
    row = SCALARS[name]
    dtypes = [DTYPE_OF_KIND[kind]] * row.arity
    if name == "select":
        dtypes[0] = "i1"
    function = ir.Function(KernelModule("ops", TARGETS["cpu:x86-64-v2"]), ir.FunctionType(ir.VoidType(), []), "f")
    builder = ir.IRBuilder(function.append_basic_block())
    try:
        emit_scalar_op(
            builder, name, [literal_register(1, d) for d in dtypes], dtypes, result_dtype(row, tuple(dtypes), dtypes[0])
        )
    except InternalError as error:
        return str(error)
    return ""


def not_imported(name, spec):
    if spec.added_by:
        known = {p.run.__name__ for p in PASSES}
        return "" if spec.added_by in known and name in said_in("aotc/lowering/passes") else f"no pass {spec.added_by}"
    if name in said_in("aotc/frontend") or (name in SCALARS and SCALARS[name].total):
        return ""
    return f"aotc/frontend/importers/{family_of(name)}.py: a row, or added_by of its row in aotc/ir/opset"


def not_lowered(name, spec):
    if spec.removed_by:
        return "" if spec.removed_by in {p.run.__name__ for p in PASSES} else f"no pass {spec.removed_by}"
    if name in SCALARS:
        errors = {kind: emission(name, kind) for kind in SCALARS[name].kinds}
        return "\n".join(f"{EMITTERS.get(kind, INTEGERS)}: {e}" for kind, e in errors.items() if e)
    if name in said_in(*(f"aotc/lowering/{room}" for room in ("plans", "regions", "elements", "program", "analysis"))):
        return ""
    return "aotc/lowering/plans/plan_region.py: a row of PLANNERS_OF_OPS, or removed_by of its row in aotc/ir/opset"


def untested(name):
    tests = [f"tests/{p.name}" for p in (ROOT / "tests").iterdir() if p.is_dir() and p != Path(__file__).parent]
    if name in imported_by_checklist() | in_golden_cases():
        return ""
    if any(text == name or f"@{name}(" in text for text in said_in(*tests)):  # the op, or a custom call that it is
        return ""
    return "tests/support/checklists/checklist_elements.py (or a test of its own that names the op): a case"


def family_of(name):
    return next(family for family, table in FAMILIES.items() if name in table)


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_complete(name):
    spec = OPS[name]
    missing = [not_imported(name, spec), not_lowered(name, spec), untested(name)]
    if spec.tolerance is None and name not in CONTROL_FLOW | EFFECTS | CALLS:
        missing.append(f"aotc/ir/opset/{family_of(name)}.py: a tolerance")
    if name not in documented():
        missing.append("docs/tensor_ir.md: a row")
    assert not any(missing), f"{name} is not complete; to be written:\n" + "\n".join(filter(None, missing))
