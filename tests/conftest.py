"""What holds for every test: where plans are remembered, how long examples may take, and who starts processes."""

import contextlib
import gc
import glob
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# Before anything is imported that could start the fork server, whose children inherit the environment of its start.
_native = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "shardwright/native"
_cache = tempfile.TemporaryDirectory(prefix="shardwright-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
# Native code, which is known by its source, is compiled once for all workers.
with contextlib.suppress(OSError, RuntimeError):
    _native.mkdir(mode=0o700, parents=True, exist_ok=True)
    Path(_cache.name, "shardwright").mkdir()
    Path(_cache.name, "shardwright/native").symlink_to(_native)

# How long an example takes, or is drawn, says more about what runs beside it. All runs draw the same ones.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("brief", settings.get_profile("any machine"), max_examples=30)  # without slow tests
settings.load_profile("any machine")
# It would take some numbers from the package's modules that are imported by then, as tests before have left them.
assert callable(providers._get_local_constants), "another release of hypothesis: find what has its place"
providers._get_local_constants = providers.Constants


def pytest_configure(config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        settings.load_profile("brief")
    gc.disable()  # until all is imported, of which each collection would look through more and find nothing
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as behind a shell's &: all that is started would ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("SHARDWRIGHT_TEST_DEVICE"):
        import device  # noqa: F401  # refuses one that is not there, before anything runs

        os.environ.setdefault("SHARDWRIGHT_BACKEND", "gloo")  # launched jobs have more ranks than there are GPUs
    elif glob.glob("/dev/nvidia[0-9]*"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as many ranks as a test wants share the CPU, wherever it runs


def pytest_collection_finish() -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # of several workers; the threads of one would wait for cores that others have
    gc.freeze()  # what is imported by now lives on, and a collection that looks through it takes a third of a second
    gc.set_threshold(50_000, 20, 20)  # captures leave few cycles; looking for these took 7 % of the time of tests
    gc.enable()


def pytest_unconfigure() -> None:
    _cache.cleanup()


def pytest_runtest_setup() -> None:
    """What a test draws without a seed is the same whatever its process has done before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


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
