"""Paths that Python functions read and write are checked first, with errors of aotc that name them."""

from pathlib import Path

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.ir


def refuse_to_trace(x):
    raise AssertionError("the function is traced before the output is checked")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("missing/a.vmfb", "there is no folder missing\n  try: make it, or another place with output="),
        (".", "it is a folder\n  try: output= with the name of a file"),
        (Path("missing/a.vmfb"), "there is no folder missing"),
        (3, "output is 3\n  try: the path of the bundle to write"),
    ],
)
def test_compile_checks_the_output_before_it_traces(output, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(aotc.CompileError) as error:
        aotc.compile(refuse_to_trace, np.ones(3, "f4"), output=output)
    assert message in str(error.value)


def test_tune_of_a_missing_bundle_is_an_error_of_aotc(tmp_path):
    with pytest.raises(aotc.BundleNotFoundError, match=r"missing\.vmfb"):
        aotc.tune(tmp_path / "missing.vmfb")


def test_tune_names_the_bundle_without_source(tmp_path):
    path = tmp_path / "no_source.vmfb"
    aotc.compile(lambda x: x + 1, np.ones(3, "f4"), output=path, source=False)
    with pytest.raises(aotc.BundleError, match=r"no_source\.vmfb: error: "):
        aotc.tune(path)
