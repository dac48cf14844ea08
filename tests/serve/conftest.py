"""What several tests of the server serve."""

import pytest
from support import tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A folder with the tiny bundle, which nobody changes."""
    path = tmp_path_factory.mktemp("tiny")
    (path / "tiny.vmfb").write_bytes(tiny.bundle())
    return path
