from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launching


@pytest.fixture
def launching(tmp_path: Path) -> Iterator[Launching]:
    job = Launching(tmp_path)
    try:
        yield job
        job.assert_none_left()
    finally:
        job.close()
