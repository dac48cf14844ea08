"""The instruction table and what reads it: documentation, text, verifier."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotc.vmfb import isa
from aotc.vmfb.assembly import assemble, bytecode_document, disassemble
from aotc.vmfb.isa import ISA, Dt, Frame, Ins, Text, encode_instruction
from aotc.vmfb.verify.call_memory import CallMemory
from aotc.vmfb.verify.kernel_interface import Invalid
from aotc.vmfb.verify.program import check_program
from aotc.vmfb.vm import decode_program, interpret_program

pytestmark = pytest.mark.ir

DOCUMENT = Path(__file__).parents[2] / "docs" / "bytecode.md"


def test_the_document_is_the_table(update):
    if update or os.environ.get("AOTC_UPDATE"):
        DOCUMENT.write_text(bytecode_document())
    assert DOCUMENT.read_text() == bytecode_document(), "run: python -m aotc.vmfb.assembly > docs/bytecode.md"


def test_every_instruction_is_documented_and_numbered_once():
    assert all(row.run.__doc__ for row in ISA.values())
    with pytest.raises(ValueError, match="twice"):
        isa.instruction(0x01)(lambda vm: None)


def _operand(kind):
    if kind is Text:
        return st.text(max_size=12)
    if kind is Dt:
        return st.sampled_from(["i1", "i32", "u8"])
    if kind is Ins:
        return st.lists(st.integers(0, 99), max_size=4)
    return st.integers(-(1 << 63), (1 << 63) - 1) if kind is isa.Imm else st.integers(0, 99)


_LINE = st.sampled_from(sorted(ISA)).flatmap(
    lambda opcode: st.tuples(st.just(opcode), *map(_operand, ISA[opcode].kinds)).map(list)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_LINE, max_size=6))
def test_text_reads_back(code):
    text = disassemble(code)
    assert assemble(text) == code
    assert disassemble(assemble(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fly r0", "line 1: no instruction 'fly'"),
        ("return\nadd r0, r1", "line 2: add has 3 operands, not 2"),
        ("add r0, r1, 7", "expected rN, found 7"),
        ("5: return", "this is instruction 0"),
        ("load_scalar r0, slot0, r0, i64", "expected a dtype"),
        ("submit cb0, r1", "expected a list of registers"),
        ('assert_true r0, "open, []', "line 1"),
    ],
)
def test_text_that_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        assemble(text)


def test_comments_and_blank_lines():
    assert assemble('# start\n\nassert_true r0, "a # b", [] # check\nreturn') == [
        encode_instruction("assert_true", 0, "a # b", []),
        encode_instruction("return"),
    ]


@pytest.mark.parametrize(
    ("name", "a", "b", "expected"),
    [
        ("add", 7, -2, 5),
        ("sub", 7, -2, 9),
        ("mul", 7, -2, -14),
        ("floordiv", 7, -2, -4),
        ("mod", 7, -2, -1),
        ("max", 7, -2, 7),
        ("min", 7, -2, -2),
        ("eq", 7, 7, 1),
        ("ne", 7, 7, 0),
        ("lt", -2, 7, 1),
        ("le", 7, 7, 1),
        ("and", 7, 0, 0),
        ("or", 0, -2, 1),
    ],
)
def test_integer_instructions(name, a, b, expected):
    program = assemble(f"const r0, {a}\nconst r1, {b}\n{name} r2, r0, r1\nnot r3, r2\nreturn")
    frame = Frame(4, [], None, "f", ())
    interpret_program(decode_program(program), frame)
    assert frame.registers[2:] == [expected, int(expected == 0)]


def test_a_loop_in_bytecode():
    program = assemble("const r1, 1\nconst r2, 10\nadd r0, r0, r1\nlt r3, r0, r2\nbranch_if r3, @2\nreturn")
    frame = Frame(4, [], None, "f", ())
    interpret_program(decode_program(program), frame)
    assert frame.registers[0] == 10


SIGNATURE = {"arguments": [{"dims": [3, "n"]}], "results": [{"dims": ["n"]}]}
BUFFERS = [{"parameters": 1}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("const r4, 0", "Out 4 is not below 2"),
        ("add r0, r9, r0", "In 9 is not below 2"),
        ("dim r0, arg1, axis0", "Arg 1 is not below 1"),
        ("dim r0, arg0, axis2", "Axis 2 is not below 2"),
        ("result res1, [r0]", "Res 1"),
        ("result res0, []", "result 0 has rank 1, not 0"),
        ("submit cb1, []", "Cb 1"),
        ("submit cb0, []", "has 1 parameters, not 0"),
        ("submit cb0, [r7]", "In 7"),
        ("branch @2", "Target 2 is not below 2"),
        ("load_scalar r0, slot4, r0, %i64", "Slot 4 is not below 4"),
        ("load_scalar r0, slot0, r0, %f32", "not an integer dtype"),
        ("const r0, 9223372036854775808", "does not fit in 64 bits"),
    ],
)
def test_the_verifier_refuses(line, message):
    with pytest.raises(Invalid, match=message):
        check_program(assemble(line + "\nreturn"), 2, SIGNATURE, BUFFERS)


VECTOR = {"dtype": "f32", "dims": ["n"]}


@pytest.mark.parametrize(
    ("given", "other", "allowed"),
    [(True, {}, True), (False, {}, False), (True, {"dtype": "i32"}, False), (True, {"dims": [3]}, False)],
)
def test_a_result_takes_what_is_given_and_fits(given, other, allowed):
    signature = {"arguments": [{**VECTOR, **other, "donated": given}], "results": [VECTOR]}
    code = assemble("take res0, arg0\nreturn")
    if allowed:
        check_program(code, 0, signature, [])
    else:
        with pytest.raises(Invalid, match="result 0 cannot be in the memory of argument 0"):
            check_program(code, 0, signature, [])


def test_memory_is_taken_once():
    memory = CallMemory([16, 16], [True, False], [VECTOR, VECTOR], [0])
    with pytest.raises(Invalid, match="cannot have the memory of argument 1"):
        memory.share_argument_memory(0, 1)
    memory.share_argument_memory(0, 0)
    for number in (0, 1):
        with pytest.raises(Invalid):
            memory.share_argument_memory(number, 0)
    with pytest.raises(Invalid, match="made twice"):
        memory.allocate_result(0, (4,))


@pytest.mark.parametrize(
    "code", [[], [[0x01, 0, 0]], [[0x7F], [0x42]], [[0x42, 1]], [["x"], [0x42]], [[True, 0, 0], [0x42]]]
)
def test_the_verifier_refuses_odd_programs(code):
    with pytest.raises(Invalid):
        check_program(code, 4, SIGNATURE, BUFFERS)
