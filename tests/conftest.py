"""What holds for every test: where plans are remembered, how long examples may take, and who starts processes."""

import glob
import os
import tempfile
from collections.abc import Iterator
from types import ModuleType

import pytest
from hypothesis import settings

# Before anything is imported that could start the fork server, whose children inherit the environment of its start.
_cache = tempfile.TemporaryDirectory(prefix="shardwright-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name

# How long an example takes says more about what runs beside it.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


def pytest_configure() -> None:
    if os.environ.get("SHARDWRIGHT_TEST_DEVICE"):
        import device  # noqa: F401  # refuses one that is not there, before anything runs

        os.environ.setdefault("SHARDWRIGHT_BACKEND", "gloo")  # launched jobs have more ranks than there are GPUs
    elif glob.glob("/dev/nvidia[0-9]*"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as many ranks as a test wants share the CPU, wherever it runs


def pytest_unconfigure() -> None:
    _cache.cleanup()


@pytest.fixture
def float64() -> Iterator[None]:
    """New tensors are in float64, and drawn as in every other such test."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


# Who imports one of these starts processes, which `make test-fast` does without.
STARTERS = {"hosts", "launching", "many_hosts", "multiprocessing", "pages", "ranks", "slurm", "stalling", "subprocess"}


def starts_processes(module: ModuleType) -> bool:
    return any(
        value.__name__ in STARTERS if isinstance(value, ModuleType) else getattr(value, "__module__", None) in STARTERS
        for value in vars(module).values()
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known: dict[ModuleType, bool] = {}
    for item in items:
        module = getattr(item, "module", None)
        if module is not None and known.setdefault(module, starts_processes(module)):
            item.add_marker(pytest.mark.processes)
