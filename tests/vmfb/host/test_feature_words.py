"""What a Linux on AArch64 says of its processor: words of bits, and the length of vectors of this process."""

from types import SimpleNamespace

import pytest

from aotc.vmfb.host import machine

pytestmark = pytest.mark.cpu
ASIMD, DOTS, SVE = 1 << 1, 1 << 20, 1 << 22
UNITS = {1 << 9: "svei8mm", 1 << 12: "svebf16", 1 << 13: "i8mm", 1 << 14: "bf16"}
INHERITED = 1 << 17  # a bit beside the length in the system's answer


class Function:
    """A function of the C library; it takes what its types are said to be."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *arguments):
        return self.answer(*arguments)


@pytest.fixture
def become(monkeypatch):
    """Be a Linux on a machine whose words and length are made up, and return the features."""

    def become(first, second=0, length=-1, name="aarch64", system="linux"):
        words = {16: first, 26: second}
        library = SimpleNamespace(getauxval=Function(words.__getitem__), prctl=Function(lambda *_: length))
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: library)
        monkeypatch.setattr(machine.platform, "machine", lambda: name)
        monkeypatch.setattr(machine.sys, "platform", system)
        monkeypatch.setattr(machine, "_listed_cpu_features", lambda: frozenset({"listed"}))
        return machine.cpu_features.__wrapped__()

    return become


@pytest.mark.parametrize(
    ("first", "length", "names"),
    [
        (ASIMD, -1, {"asimd"}),
        (ASIMD | DOTS, -1, {"asimd", "asimddp"}),
        (ASIMD | SVE, 32, {"asimd", "sve", "sve256"}),
        (ASIMD | SVE, 64 | INHERITED, {"asimd", "sve", "sve512"}),
        (ASIMD | SVE, 16, {"asimd", "sve", "sve128"}),
        (ASIMD | SVE, -1, {"asimd", "sve", "sve0"}),  # the system does not say: no target is of that length
        (ASIMD, 32, {"asimd"}),
    ],
)
def test_words_and_length(first, length, names, become):
    assert become(first, length=length) == names | {"listed"}


@pytest.mark.parametrize(("bit", "name"), UNITS.items())
def test_units_are_in_the_second_word(bit, name, become):
    assert become(ASIMD, bit) == {"asimd", name, "listed"}
    assert become(bit) & set(UNITS.values()) == set()


@pytest.mark.parametrize(("name", "system"), [("x86_64", "linux"), ("aarch64", "darwin")])
def test_others_are_not_asked(name, system, become):
    assert become(ASIMD | SVE, length=32, name=name, system=system) == {"listed"}


def test_a_library_without_such_functions(monkeypatch):
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert machine.sve_bits() == 0
    assert machine._features_of_auxiliary_vector() == frozenset()
