"""Two readings of a schema agree: whether a value fits, and where it does not."""

import copy

import pytest
from support import tiny

from aotc.vmfb.bundle import open_bundle, write_bundle
from aotc.vmfb.manifest import SCHEMA, manifest_problem
from aotc.vmfb.verify.schema import ANY, NONE, problems, schema_acceptor

pytestmark = pytest.mark.ir

OTHERS = (None, True, -1, 0, 1.5, "text", b"bytes", [], [[]], [-1], ["x", -1], {}, {"name": 1}, {1: []})


def places(value, path=()):
    """Yield where everything in a value stands."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value, path, other):
    """Return a copy of ``value`` with ``other`` at a place, or without it."""
    if not path:
        return other
    found = copy.deepcopy(value)
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    if other is ANY:
        del inner[path[-1]]
    else:
        inner[path[-1]] = other
    return found


def test_acceptor_agrees_with_problems_of_changed_manifests():
    manifest = open_bundle(write_bundle(None, *tiny.parts())).manifest
    assert manifest_problem(manifest) == ""
    refused = 0
    for path in places(manifest):
        for other in (*OTHERS, ANY) if path else OTHERS:
            found = changed(manifest, path, other)
            wrong = any(True for _ in problems(found, SCHEMA, "manifest"))
            assert schema_acceptor(SCHEMA)(found) is not wrong, (path, other)
            refused += wrong
    assert refused > 1000


SCHEMAS = [
    int, str, NONE, ANY, (int, str), (int, list), ([int], str), (dict, NONE), [int], [(int, str)], [ANY], [[ANY]],
    {str: [int]}, {"name": str}, {"name": str, "sizes": [int], "at?": int}, [{"name?": (str, NONE)}], {},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema).replace(str(ANY), "ANY"))
def test_acceptor_agrees_with_problems_of_small_schemas(schema):
    accepts = schema_acceptor(schema)
    for one in OTHERS:
        for value in (one, [one], [one, 1], {"name": one}, {"name": "x", "sizes": [], "at": one}, {"n": [one]}):
            assert accepts(value) is (next(problems(value, schema, "it"), None) is None), value
