"""A collective that a rank leaves out is named although no call waits for it, as NCCL's do not."""

import contextlib
import io
import time

import pytest
import torch
from torch import nn

import shardwright as sw
from ranks import run_ranks
from shardwright.common.pulse import StepCalls, site
from shardwright.common.torch_private import job_store
from shardwright.compiler.mesh.processes import ProcessCommunicator
from shardwright.distributed.lockstep import PATIENCE_S, Lockstep
from shardwright.errors import UsageError
from shardwright.runtime.checks.same_calls import _refusal


def mean_square(model, batch):
    return model(batch).square().mean()


def call(parallel, batch):
    """The loss, or what is said in its place."""
    try:
        return parallel(batch), ""
    except UsageError as error:
        return None, str(error)


def calls_with_one_left_out(left_out, first_call):
    """What is said of four calls, where rank 1 makes no backward of the second.

    Data moves nowhere: a collective returns at once, as where a GPU is asked for it, and nobody waits for its end.
    What ranks tell each other in the memory of the host goes its way.
    """
    ProcessCommunicator._channel = lambda self, axes, tensor: None
    rank = sw.init("gloo").rank
    torch.manual_seed(0)
    batch = torch.randn(4, 3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    parallel = sw.parallelize(model, mean_square, batch, "data", batch="global")
    parallel._turns.seen = first_call - 1
    found = []
    for number in range(4):
        loss, said = call(parallel, batch)
        if loss is not None and not (left_out and rank == 1 and number == 1):
            loss.backward()
        found.append(said)
    return found


@pytest.mark.parametrize("first_call", [98, pytest.param(1, marks=pytest.mark.slow)])
def test_a_backward_that_one_rank_leaves_out_is_named_in_the_next_call_that_compares(first_call):
    for said in run_ranks(2, calls_with_one_left_out, True, first_call):
        assert said[:2] == ["", ""]
        assert said[2].startswith(
            "ranks did not begin the same collectives in the step before this one: rank 0 began 2 and rank 1 1, and "
            "the first that differ are all_reduce on rank 0 and nothing on rank 1; every rank must make the same calls"
        )
        assert said[3] == ""


def losses_of_models_in_turns(*meshes):
    """The losses of three steps of a model on each mesh, in turns, evaluated after each of them."""
    sw.init("gloo")
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    found, parallels = [], []
    for mesh in meshes:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).double()
        microbatches = 2 if "pp" in mesh else None
        parallels.append(
            sw.parallelize(layers, mean_square, batch.double(), mesh=mesh, microbatches=microbatches, batch="global")
        )
    for _ in range(3):
        for parallel in parallels:
            loss = parallel(batch.double())
            loss.backward()
            found.append(loss.item())
        for parallel in parallels:
            with torch.no_grad():
                found.append(parallel.eval()(batch.double()).item())
            parallel.train()
    return found


def test_models_with_other_stages_may_take_turns():
    """Ranks of one stage of one model are in several stages of another, and begin other collectives there."""
    for losses in run_ranks(3, losses_of_models_in_turns, "pp=3", "dp=3"):
        assert losses == pytest.approx([losses[0]] * 12, rel=1e-12)


def test_the_first_collective_that_differs_is_named():
    def of(*operations, count=None):
        told = [(operation.encode(), site(f"layer {i}", 1)) for i, operation in enumerate(operations)]
        return StepCalls(7, 0, count or len(operations), told)

    assert "differ are all_gather for layer 1 on rank 0 and all_reduce for layer 1 on rank 2;" in _refusal(
        0, 2, [of("all_gather", "all_gather"), None, of("all_gather", "all_reduce")]
    )
    many = of("all_reduce", count=9), of("all_reduce", count=8)  # of which the last alone are kept
    assert "differ are all_reduce for layer 0 on rank 0 and nothing on rank 1;" in _refusal(0, 1, [*many])


def waiting_for_one_that_comes_no_more(how):
    """What rank 0 writes while it is in its third call, of which rank 1 makes two or in which it fails."""
    rank, seen = sw.init("gloo").rank, io.StringIO()
    lockstep, store = Lockstep.of_all_ranks(), job_store()
    lockstep.answer_aside()  # as where the backend cannot wait in turns

    def call():
        with lockstep.call():
            lockstep.same("a batch", lambda: "passed a batch")
            if (rank, lockstep.calls, how) == (1, 3, "fails"):
                raise ValueError("broken")

    with contextlib.redirect_stderr(seen):
        call()
        call()
        if rank == 1:
            if how == "fails":
                with contextlib.suppress(ValueError):
                    call()
            if how != "comes":
                lockstep.end()
        if rank == 0 or how == "comes":
            call()
            while how != "comes" and not seen.getvalue():
                time.sleep(0.05)
            time.sleep(3 * PATIENCE_S)  # in which it is not said again
        if rank == 0:
            store.set("rank 0 has seen it", "")
        store.get("rank 0 has seen it")
        if how == "comes" or rank == 0:
            lockstep.end()
    return seen.getvalue()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ends", "rank 1 has ended after 2 calls"),
        pytest.param("fails", "rank 1 failed in it: ValueError: broken", marks=pytest.mark.slow),
        pytest.param("comes", "", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_where_nothing_can_be_raised_says_who_comes_no_more(how, said):
    zero, one = run_ranks(2, waiting_for_one_that_comes_no_more, how, timeout=60)
    assert one == ""
    assert zero == (
        f"shardwright: rank 0 is in call 3 of the model, and {said}; what this rank waits for will not come: all ranks "
        "must make the same calls, as often as each other\n"
        if said
        else ""
    )
