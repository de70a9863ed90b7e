"""Training with ``compile=True`` on real ranks: the losses are those of one device, and a later run makes no code."""

import warnings

import pytest
import torch

import shardwright as sw
from models import NETWORKS
from ranks import run_ranks
from shardwright.common.torch_private import code_from_cache
from shardwright.errors import UsageError
from shardwright.runtime.compiled.compiler import Compiler

STEPS = 20


def losses(name, mode, options):
    """The losses of a training, whose last batch of an epoch is smaller, and that of an evaluation."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    sw.init()
    sw.set_seed(3)
    make, loss_fn, batch_of = NETWORKS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel = sw.parallelize(make(), loss_fn, batch_of(6), mode, batch="global", **options)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        found = []
        for step in range(STEPS):
            result = parallel(batch_of(6 if step % 5 else 4, step))
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        with torch.no_grad():
            parallel.eval()
            result = parallel(batch_of(6))
            found.append((result[0] if isinstance(result, tuple) else result).item())
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "mode", "options"), [("transformer", "auto", {}), ("resnet", "data", {})])
def test_the_losses_are_those_of_one_device(tmp_path, name, mode, options):
    [expected] = run_ranks(1, losses, name, "single", {})
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for ours in run_ranks(2, losses, name, mode, options | {"compile": True}, timeout=600, env=kept):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-9, atol=0)


def parts_made(name, mode):
    losses(name, mode, {"compile": True})
    return code_from_cache()[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_later_run_finds_the_code_where_the_first_one_has_left_it(tmp_path):
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    first, later = (run_ranks(2, parts_made, "perceptron", "data", timeout=150, env=kept) for _ in range(2))
    assert max(first) > 0
    assert later == [0, 0]


def compiling_on_one_rank():
    torch.set_num_threads(1)
    world = sw.init()

    def compiled(function):
        if world.rank == 1:
            raise OSError("No space left on device")
        return function

    Compiler.compile = lambda self, function: lambda *given: compiled(function)(*given)
    make, loss_fn, batch_of = NETWORKS["perceptron"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parallel = sw.parallelize(make(), loss_fn, batch_of(6), "data", batch="global", compile=True)
        parallel(batch_of(6))[0].backward()
        try:
            parallel(batch_of(6))
        except UsageError as error:
            return str(error)
    return "went on"


def test_ranks_of_which_one_cannot_compile_do_not_go_on():
    """They would round values that all of them have differently."""
    for said in run_ranks(2, compiling_on_one_rank):
        assert said.startswith("ranks do not come to call 2 of the model alike: rank 0 passes a batch of ")
        assert ", which it computes with all stretches uncompiled" in said
