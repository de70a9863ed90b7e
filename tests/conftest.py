"""Plans are remembered in a folder of this test session, so that no plan of an earlier run or of a user is met."""

import os
import tempfile

from hypothesis import settings

# Before anything is imported that could start the fork server, whose children inherit the environment of its start.
_cache = tempfile.TemporaryDirectory(prefix="shardwright-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# How long an example takes says more about what runs beside it.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_unconfigure() -> None:
    _cache.cleanup()
