"""Attention reads its own operands alone: all other bytes, and those of other heads, are NaN, in every operand form."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.attention import (
    BIAS,
    HEADS,
    PROJECTED,
    SHARED,
    SLICED,
    TOKENS,
    attention_text,
    elements_of,
    operands,
    simulate,
    wanted,
)
from gpu.poisoned import between_nans, check_margins, poison

from aotc.ir.loop.forms.attention import read_attention
from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling, WgmmaAttention
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.templates.attention.launch import attention_launch, attention_tiles

pytestmark = pytest.mark.cudasim

TEMPLATES = {
    "warpgroups": (Tiling(WgmmaAttention(), 64, 64, 2), "bf16"),
    "warps": (Tiling(MmaAttention(), 32, 64, 2), "f16"),
    "warps of f32": (Tiling(MmaAttention(), 32, 32, 2), "f32"),
    "few": (Tiling(DecodeAttention(2), 32, 32, 2), "bf16"),
    "few of f32": (Tiling(DecodeAttention(), 32, 16, 2), "f32"),
}
FORMS = {"projected": PROJECTED, "sliced": SLICED, "heads": HEADS, "tokens": TOKENS, "shared": SHARED}
IN_CI = ("projected", "sliced")
SIZES = (4, 12, 77, 24, 40)  # the last block of terms is partial, and no head fills a piece of 128 bytes
PAIRS = ((0, 1), (2, 3))  # heads of one batch entry


def check(template, orders, heads, causal=None, score=None, symbolic=False):
    """Compare the results of ``heads`` with float64 where everything that is not an element of theirs is NaN."""
    tiling, dtype = TEMPLATES[template]
    given, dims = (SIZES[0], *("m", "n"), *SIZES[3:]) if symbolic else SIZES, SIZES[1:3] if symbolic else ()
    bias = {"score": BIAS} if score else {}
    text = attention_text(tiling, given, dtype, "f32", orders, causal, **bias)
    _, arrays = operands(text, dims=dims)
    whole = [arrays[n][elements_of(x, orders, SIZES)].copy() for n, x in enumerate("qkv")]
    for n, x in enumerate("qkv"):
        keep = np.zeros(arrays[n].shape, bool)
        keep[elements_of(x, orders, SIZES, np.array(heads))] = True
        poison(arrays[n], keep)
    simulate(text, arrays, score and score(arrays), dims=dims)
    got = np.moveaxis(arrays[-1], 1, 0) if orders is TOKENS else arrays[-1]
    want = wanted([*whole, *arrays[3:]], HEADS, causal, bias=bool(score))
    np.testing.assert_allclose(got[list(heads)], want[list(heads)], atol=0.01)
    for array in arrays:
        check_margins(array)


@pytest.mark.parametrize("heads", PAIRS)
@pytest.mark.parametrize("form", [pytest.param(f, marks=() if f in IN_CI else pytest.mark.slow) for f in FORMS])
@pytest.mark.parametrize("template", TEMPLATES)
def test_heads_read_their_own_elements(template, form, heads):
    check(template, FORMS[form], heads)


@pytest.mark.parametrize("template", [t for t in TEMPLATES if not t.endswith("f32")])
def test_causal_heads_read_their_own_elements(template):
    check(template, PROJECTED, PAIRS[1], causal=60)


@pytest.mark.parametrize("template", [t for t in TEMPLATES if not t.endswith("f32")])
def test_symbolic_sizes(template):
    check(template, PROJECTED, PAIRS[0], symbolic=True)


@pytest.mark.parametrize("template", [t for t in TEMPLATES if not t.endswith("f32")])
def test_scores_are_asked_for_inside_of_their_bias(template):
    """A bias has an element for each term of a row, and NumPy refuses what is beyond them."""

    def score(arrays):
        return lambda z, row, term, total: np.float32(total * np.float32(0.125) + np.float32(arrays[3][row, term]))

    check(template, PROJECTED, PAIRS[1], score=score)


@pytest.mark.parametrize("causal", [None, 0])
@pytest.mark.parametrize("symbolic", [False, True])
def test_the_last_term_is_that_of_the_loop(symbolic, causal):
    """Merged dims of the keys' buffer say nothing of it: tensor maps end with each batch entry's last key."""
    n = "n" if symbolic else 77
    text = attention_text(Tiling(WgmmaAttention(), 64, 64, 2), (4, 100, n, 64, 64), orders=PROJECTED, causal=causal)
    kernel = parse_kernel(text)
    found, tiles, entry = read_attention(kernel), attention_tiles(kernel), attention_launch(kernel)
    assert str(found.terms) == str(n)
    assert found.causal == tiles.causal == (causal is not None)
    assert entry["resident"] == (causal is None and not symbolic)
    terms = entry["maps"][1]["sizes"][1]
    assert terms == 77 or symbolic


def test_poisoned_memory_is_noticed():
    array = between_nans(np.zeros(5, np.float32))
    check_margins(array)
    np.lib.stride_tricks.as_strided(array, (6,), (4,))[5] = 1
    with pytest.raises(AssertionError):
        check_margins(array)
