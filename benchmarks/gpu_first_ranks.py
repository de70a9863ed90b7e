"""The steps of `gpu_first.py` for ranks of `shardwright launch`: FUNCTION DEVICE quick|whole ANSWER."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_first_steps import SMALL, Network, close, images, largest, loss_fn, losses, words
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.cluster.bench.profile import measure_links
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.mesh.processes import communicator_over
from shardwright.compiler.plan.pricing.hardware import for_device
from shardwright.distributed.world import World
from shardwright.errors import ShardwrightError
from shardwright.runtime.programs.splitting import older_than

# Bytes per rank that hold no whole copy of the small transformer with gradients and both moments, by ranks.
BUDGETS = {2: "3.6MB", 4: "2.4MB"}
COLUMNS = {"*.up": ((1, 1, 1), (2, 1)), "*.down": ((1, 1, 2), (1, 2))}


def joined(device: str) -> World:
    """The world, whose ranks share the GPUs that there are."""
    if device != "cuda":
        return sw.init(device="cpu")
    return sw.init(device=f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}")


def plain(name: str, call: Callable[[nn.Module, Any], torch.Tensor] = loss_fn, steps: int = 3) -> list[float]:
    """What one CPU loses, in float64."""
    model, batch = SMALL[name].made(torch.device("cpu"), torch.float64)
    return losses(model, lambda: call(model, batch), steps)


def split(world: World, name: str, **options: Any) -> tuple[Any, Any]:
    """The model on all ranks, and its whole batch."""
    model, batch = SMALL[name].made(world.device, torch.float64)
    parallel = sw.parallelize(model, loss_fn, batch, batch="global", **options)
    assert parallel.plan is not None, f"{name} was not captured"
    return parallel, batch


def data(world: World) -> float:
    parallel, batch = split(world, "perceptron", mode="data")
    return close("data", losses(parallel, lambda: parallel(batch)), plain("perceptron"), 1e-9)


def tensor_parallel(world: World) -> float:
    parallel, batch = split(world, "transformer", mode="semi-auto", pins=COLUMNS)
    return close("tensor parallel", losses(parallel, lambda: parallel(batch)), plain("transformer"), 1e-9)


def global_batch_norm(world: World) -> float:
    parallel, batch = split(world, "resnet", mode="data")
    return close("global batch norm", losses(parallel, lambda: parallel(batch)), plain("resnet"), 1e-8)


def own_parts(world: World) -> float:
    """Each rank passes its own rows, now and then another number of them, and asks for the others' on the way."""
    sizes = [(4, 4), (4, 4), (4, 3), (4, 4)]
    model, batch = SMALL["perceptron"].made(torch.device("cpu"), torch.float64)
    expected = [float(loss_fn(model, tuple(tensor[: sum(rows)] for tensor in batch))) for rows in sizes]

    def part(rows: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        start = sum(rows[: world.rank])
        return tuple(tensor[start : start + rows[world.rank]].to(world.device) for tensor in batch)

    model, _ = SMALL["perceptron"].made(world.device, torch.float64)
    parallel = sw.parallelize(model, loss_fn, part(sizes[0]), "data", batch="local")
    return close("own parts", [float(parallel(part(rows))) for rows in sizes], expected, 1e-9)


def _clipped(model: Any, call: Callable[[Any], torch.Tensor], batch: Any) -> list[float]:
    """Two halves of the batch for each step, and gradients clipped to a norm of 0.1."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        halves = [[part[:32] for part in batch], [part[32:] for part in batch]]
        with model.accumulate() if hasattr(model, "accumulate") else torch.enable_grad():
            first = call(halves[0]) / 2
            first.backward()
        second = call(halves[1]) / 2
        second.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        found += [float(first + second), float(norm)]
    return found


def accumulation_and_clipping(world: World) -> float:
    model, batch = SMALL["perceptron"].made(torch.device("cpu"), torch.float64)
    expected = _clipped(model, lambda part: loss_fn(model, part), batch)
    parallel, batch = split(world, "perceptron", mode="auto", search="propagation")
    return close("accumulation and clipping", _clipped(parallel, parallel, batch), expected, 1e-9)


def loader_with_plan(world: World) -> float:
    x, y = images(96, 28, 1)
    dataset = torch.utils.data.TensorDataset(x, y)

    def epoch(model: Any, call: Callable[[Any], torch.Tensor], batches: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for batch in batches:
            loss = call(batch)
            found.append(float(loss))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    class Alone:
        rank, size = 0, 1

    model, _ = SMALL["perceptron"].made(torch.device("cpu"))
    batches = sw.loader(dataset, batch_size=32, world=Alone())
    expected = epoch(model, lambda batch: loss_fn(model, tuple(batch)), batches)
    model, _ = SMALL["perceptron"].made(world.device)
    first = sw.loader(dataset, batch_size=32).sample_batch()
    parallel = sw.parallelize(model, loss_fn, first, mode="auto", search="propagation")
    cut = sw.loader(dataset, batch_size=32, plan=parallel.plan, pin_memory=world.device.type == "cuda")
    return close("a loader with a plan", epoch(parallel, parallel, cut), expected, 1e-4)


SHARDS = not older_than(torch.__version__, 2, 12)  # older ones are refused for sharded parameters
LEFT_OUT: dict[str, Any] = {} if SHARDS else {"left out": "sharded parameters, which need torch 2.12"}


def two_ranks(world: World, quick: bool) -> dict[str, Any]:
    sharded = (tensor_parallel, accumulation_and_clipping, loader_with_plan) if SHARDS else ()
    cases = (data, global_batch_norm, own_parts, *sharded)
    return {case.__name__: case(world) for case in cases} | LEFT_OUT


def _bf16_losses(model: Any, call: Callable[[], torch.Tensor], device: torch.device) -> list[float]:
    def cast() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return call()

    return losses(model, cast)


def bf16(world: World) -> float:
    """Three steps under autocast beside those of one device, which are told of as far as bf16 goes."""
    worst = 0.0
    for name, network in SMALL.items():
        model, batch = network.made(world.device)
        expected = _bf16_losses(model, lambda model=model, batch=batch: loss_fn(model, batch), world.device)
        model, batch = network.made(world.device)
        with torch.autocast(world.device.type, torch.bfloat16):
            parallel = sw.parallelize(model, loss_fn, batch, "data", batch="global")
        got = _bf16_losses(parallel, lambda parallel=parallel, batch=batch: parallel(batch), world.device)
        worst = max(worst, close(f"{name} in bf16", got, expected, 2e-2))
    return worst


def within_a_budget(world: World) -> float:
    """Parameters are split, and gathered once more in the backward where the plan says so."""
    parallel, batch = split(world, "transformer", mode="auto", memory=BUDGETS[world.size], optimizer="adamw")
    assert any(isinstance(parameter, DTensor) for parameter in parallel.parameters()), "nothing is split"
    return close("within a budget", losses(parallel, lambda: parallel(batch)), plain("transformer"), 1e-9)


def recomputed(world: World) -> float:
    parallel, batch = split(world, "transformer", mode="data", recompute=("layers.*",))
    return close("recomputed", losses(parallel, lambda: parallel(batch)), plain("transformer"), 1e-9)


def compiled(world: World) -> float:
    parallel, batch = split(world, "transformer", mode="semi-auto", pins=COLUMNS, compile=True)
    return close("compiled", losses(parallel, lambda: parallel(batch)), plain("transformer"), 1e-9)


def saved(world: World) -> float:
    """Every rank writes its parts while steps overwrite them, and all load them again."""
    parallel, batch = split(world, "transformer", mode="auto", memory=BUDGETS[world.size], optimizer="adamw")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)

    def step() -> float:
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    step()
    folder = "saved"  # in the folder in which all ranks run
    sw.checkpoint.save(folder, parallel, optimizer, step=1, asynchronous=True)
    expected = [step() for _ in range(3)]
    sw.checkpoint.wait(parallel)
    sw.checkpoint.load(folder, parallel, optimizer)
    return close("saved", [step() for _ in range(3)], expected, 1e-9)


def split_parameters(world: World, quick: bool) -> dict[str, Any]:
    sharded = (within_a_budget, saved, *(() if quick else (compiled,))) if SHARDS else ()
    cases = (bf16, recomputed, *sharded)
    return {case.__name__: case(world) for case in cases} | LEFT_OUT


def groups(world: World, quick: bool) -> dict[str, Any]:
    """A group that rank 0 makes alone, then one of all; evaluations and other shapes while gradients are under way."""
    alone = sw.create_group([0])
    both = sw.create_group([0, 1])
    number = torch.ones(1, device=world.device)
    if world.rank == 0:
        dist.all_reduce(number, group=alone)
    dist.all_reduce(number, group=both)
    assert number.item() == 2, number
    if not SHARDS:
        return {"groups": "made"} | LEFT_OUT
    parallel, batch = split(world, "transformer", mode="semi-auto", pins=COLUMNS)
    found = []
    for rows in (8, 6, 4):  # each a program of its own, whose groups are made while the last step is under way
        part = tuple(tensor[:rows] for tensor in batch)
        parallel(part).backward()
        parallel.module.eval()
        found.append(float(parallel(part)))
        parallel.module.train()
    model, batch = SMALL["transformer"].made(torch.device("cpu"), torch.float64)
    expected = [float(loss_fn(model, tuple(tensor[:rows] for tensor in batch))) for rows in (8, 6, 4)]
    assert largest(found, expected) < 1e-9, (found, expected)
    return {"groups": "made"}


class Table(nn.Module):
    """Classifies words, one by one, by rows of a table that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.table(ids))
        return found


def ids_out_of_range(world: World) -> str:
    """What is said of an id that is in no row: on GPUs of the loss of a step first, and then at the next one."""
    model, (ids, target) = Network(Table, lambda: words(64, 8, 32)).made(world.device)
    pins = {"table": ((2, 1), (1, 1))}
    parallel = sw.parallelize(model, loss_fn, (ids, target), batch="global", mode="semi-auto", pins=pins)
    parallel((ids, target)).backward()
    wrong = ids.clone()
    wrong[0, 0] = 64
    try:
        loss = parallel((wrong, target))
        assert loss.isnan(), loss
        parallel((ids, target))
    except ShardwrightError as error:
        return str(error)
    raise AssertionError("an id out of range is taken")


def every_dtype(world: World) -> list[str]:
    """Sums and gathers over ranks, also of what NCCL does not take."""
    comm = communicator_over(Mesh.of(d=2))
    comm.prepare([("d",)])
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.bfloat16, torch.complex64]
    for dtype in dtypes:
        given = [torch.tensor([[0, 1], [1, rank]]).to(dtype) for rank in range(2)]
        mine = given[world.rank].to(world.device)
        assert torch.equal(comm.all_gather(mine, ("d",)).cpu(), torch.stack(given)), dtype
        total = (given[0].to(torch.complex128) + given[1].to(torch.complex128)).to(torch.complex64)
        if dtype != torch.bool:
            scattered = comm.reduce_scatter(mine, ("d",)).cpu().to(torch.complex64)
            assert torch.equal(scattered, total[world.rank]), dtype
            assert torch.equal(comm.all_reduce(mine, ("d",)).cpu().to(torch.complex64), total), dtype
    comm.close()
    return [str(dtype).removeprefix("torch.") for dtype in dtypes]


def ids_and_dtypes(world: World, quick: bool) -> dict[str, Any]:
    return {"dtypes": every_dtype(world)} | ({"said": ids_out_of_range(world)} if SHARDS else LEFT_OUT)


def stalling(world: World, quick: bool) -> dict[str, Any]:
    """Rank 1 sleeps before its sixth step, when batches are compared no more."""
    parallel, batch = split(world, "perceptron", mode="data")
    for at in range(8):
        if at == 5 and world.rank == 1:
            time.sleep(1000)
        parallel(batch).backward()
    return {}


def clean_exit(world: World, quick: bool) -> dict[str, Any]:
    number = torch.ones(1, device=world.device)
    dist.all_reduce(number)
    cores = len(os.sched_getaffinity(0))  # on GPUs, a share of those near this rank's
    return {"sum": number.item(), "device": str(world.device), "backend": world.backend, "cores": cores}


def links(world: World, quick: bool) -> dict[str, Any]:
    """Seconds of an all-reduce between two ranks over those of the shipped profile."""
    shipped, found = for_device(world.device.type), {}
    for link in measure_links(world, (2**16, 2**20) if quick else (2**16, 2**20, 2**26), 3):
        for size, seconds in link.points if link.collective == "all_reduce" else ():
            priced = shipped.collective_s(link.collective, size, link.ranks, link.where)
            found[f"{size} bytes over shipped"] = round(seconds / priced, 2)
    return found


FUNCTIONS = {
    function.__name__: function
    for function in (two_ranks, split_parameters, groups, ids_and_dtypes, stalling, clean_exit, links)
}


def main() -> None:
    name, device, size, answer = sys.argv[1:]
    world = joined(device)
    found = FUNCTIONS[name](world, size == "quick")
    if world.rank == 0:
        Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
