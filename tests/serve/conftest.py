"""What several tests of the server serve."""

import pytest
from support import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the tiny bundle, which nobody changes."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "tiny.vmfb").write_bytes(tiny.bundle())
    return path


@pytest.fixture(scope="session")
def two_models(tmp_path_factory):
    """A folder with a model of results and one of tokens, which nobody changes."""
    from serve import texts  # it needs JAX, which the environment of Ray's tests has not

    path = tmp_path_factory.mktemp("models")
    (path / "texts.vmfb").write_bytes(texts.bundle())
    (path / "tiny.vmfb").write_bytes(tiny.bundle())
    return path


@pytest.fixture(scope="session")
def hostile_models(tmp_path_factory):
    """A folder with a model that adds, one that doubles any number of numbers, and one that takes as long as told."""
    from serve import endless

    path = tmp_path_factory.mktemp("hostile")
    for name, data in (("tiny", tiny.bundle()), ("double", endless.doubling()), ("spin", endless.spinning())):
        (path / f"{name}.vmfb").write_bytes(data)
    return path
