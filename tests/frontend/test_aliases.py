"""Aliases of a model's text hide nesting and size from its brackets: both sides of the limits, and their cost."""

import time

import pytest

from aotc.diagnostics import CompileError
from aotc.frontend import aliases
from aotc.frontend.aliases import check_aliases
from aotc.frontend.importer import import_model
from aotc.frontend.mlir_types import MOST_LEAVES, MOST_NESTED_TUPLES
from aotc.frontend.model_text import MOST_BRACES, check_braces

pytestmark = pytest.mark.ir

MAIN = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> LOC}"


def chain(first, step, count):
    """Return definitions each of which refers to the one before; ``step`` has ``{0}`` and ``{1}`` for the numbers."""
    return first + "".join(step.format(n, n + 1) for n in range(count))


def attributes(count):
    main = MAIN.replace("LOC", "")
    return chain("#a0=[1]\n", "#a{1}=[#a{0}]\n", count) + f"module attributes {{x.a=#a{count}}} {{ {main} }}"


def types(count, step="!a{1}=tuple<!a{0}>\n"):
    text = chain("!a0=tensor<i32>\n", step, count)
    return text + f"module {{ func.func @main(%x: !a{count}) -> !a{count} {{ return %x : !a{count} }} }}"


def locations(count, step='#loc{1} = loc("a"(#loc{0}))\n'):
    text = MAIN.replace("LOC", f"loc(#loc{count})")
    return f"module {{ {text} }}\n" + chain("#loc0 = loc(unknown)\n", step, count)


@pytest.mark.parametrize(
    ("text", "alias", "line"),
    [
        (attributes(30_000), "#a1000", 1001),
        (types(3000), "!a1000", 1001),
        (types(20_000), "!a1000", 1001),
        (types(3000, "!a{1} =\n tuple<\n!a{0}> // !a{0}\n"), "!a1000", 2999),
        (types(3000, "!a{1}-=tuple<!a{0}- >\n").replace("!a0=", "!a0-="), "!a1000-", 1001),
        (locations(60_000), "#loc1001", 1003),
        (attributes(3000).replace("\n#", "#"), "#a1000", 1),
    ],
)
def test_deep_aliases_are_refused_before_mlir_parses_them(text, alias, line):
    for form in (str, str.encode):
        message = rf"<model>:{line}: error: the alias {alias} is nested 1,001 deep .* expected at most 1,000"
        with pytest.raises(CompileError, match=message) as caught:
            import_model(form(text))
        assert "try: use fewer aliases" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        types(60, "!a{1}=tuple<!a{0},!a{0}>\n"),
        types(60, "!a{1}=(!a{0})->!a{0}\n"),
        locations(60, "#loc{1} = loc(callsite(#loc{0} at #loc{0}))\n"),
        locations(60, "#loc{1} = loc(fused[#loc{0}, #loc{0}])\n"),
    ],
    ids=["tuples", "functions", "callsites", "fused"],
)
def test_large_aliases_are_refused(text):
    with pytest.raises(CompileError, match=r"<model>:\d+: error: the alias [#!]\w+ expands to [\d,]+ characters"):
        import_model(text)


def test_an_alias_may_be_used_by_many_aliases():
    check_aliases(chain("#a = [1]\n#b0=[2]\n", "#b{1}=[#a, #b{0}, #a]\n", 900).encode(), "", MOST_BRACES)


def test_many_uses_of_a_long_alias_are_refused():
    wide = f"!t = tuple<{', '.join(['i32'] * 10_000)}>\n"
    calls = '%y = "f"() : () -> !t\n'
    check_aliases((wide + calls * 1000).encode(), "", MOST_BRACES)
    with pytest.raises(CompileError, match=r":1: error: the alias !t and others expand to [\d,]+ characters in all"):
        check_aliases((wide + calls * 3000).encode(), "", MOST_BRACES)


@pytest.mark.parametrize("make", [attributes, locations])
def test_alias_chains_up_to_the_limit_are_read(make):
    import_model(make(MOST_BRACES - 5))  # the ops that follow the last definition count as part of it


def test_location_aliases_of_call_stacks_are_read():
    """JAX writes a frame of the stack as a location, and a stack as a chain of call sites."""
    frames = "".join(f'#f{n} = loc("/train.py":{n}:4 to :20)\n' for n in range(400))
    stack = chain("#loc0 = loc(callsite(#f0 at #f1))\n", "#loc{1} = loc(callsite(#f{0} at #loc{0}))\n", 399)
    names = "".join(f'#loc{n} = loc("jit(main)/add"(#loc399))\n' for n in range(400, 3000))
    main = MAIN.replace("LOC", "loc(#loc2999)")
    import_model(f"module {{ {main} }}\n{frames}{stack}{names}")


@pytest.mark.parametrize("more", [0, 1])
def test_tuples_nested_beyond_the_limit_are_refused(more):
    deep = types(MOST_NESTED_TUPLES + more)
    if more:
        with pytest.raises(CompileError, match=rf":\d+:\d+: error: a tuple is nested more than {MOST_NESTED_TUPLES}"):
            import_model(deep)
    else:
        import_model(deep)


def test_a_tuple_of_too_many_tensors_is_refused_at_its_function(monkeypatch):
    for limit in ("MOST_EXPANDED", "MOST_EXPANDED_USES"):
        monkeypatch.setattr(aliases, limit, 1 << 200)  # as in bytecode, which has no aliases
    with pytest.raises(CompileError, match=rf":62:\d+: error: a tuple has more than {MOST_LEAVES:,} tensors"):
        import_model(types(60, "!a{1}=tuple<!a{0},!a{0}>\n"))


def test_aliases_in_names_and_strings_do_not_count():
    """Dialects' attributes, comments and strings look like definitions and references."""
    text = '#a = "#a = [#b]" // #c = #c\n#stablehlo = [#a]\nmodule attributes {x.a = #stablehlo, x.b = "#d ="} {\n'
    import_model(text + MAIN.replace("LOC", 'loc("#a = #loc")') + "}")


def test_screening_aliases_is_cheap():
    names = "".join(f'#loc{n + 1} = loc("jit(main)/layer_{n}/dot"(#loc0))\n' for n in range(20_000))
    ops = "".join(f"%{n + 1} = stablehlo.sine %{n} : tensor<f32> loc(#loc{n + 1})\n" for n in range(20_000))
    text = f"module {{ func.func @main(%0: tensor<f32>) {{\n{ops} return }} }}\n#loc0 = loc(unknown)\n{names}"
    start = time.process_time()
    check_braces(text, "")
    assert time.process_time() - start < 0.3  # 0.02 s on a machine without load
    for hostile in ("#a" * 500_000, "#" + "a" * 1_000_000, "#a" + " " * 1_000_000, "#a-" * 300_000, "#a=" * 300_000):
        start = time.process_time()
        check_aliases(hostile.encode(), "", MOST_BRACES)
        assert time.process_time() - start < 2
