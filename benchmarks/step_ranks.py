"""What each rank of `step.py` runs: one way to train a model, in turn with the same steps without communication.

    step_ranks.py --model transformer --way ddp --answer FILE

Every way is written as its users write it: the model and the optimizer (AdamW) of each are the same. The way's limit
takes turns with it in the same processes: plain PyTorch on this rank's rows, with nothing between the ranks. With
``--check`` three steps are made in float64 first, whose losses go into the answer beside those of plain PyTorch on all
rows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
Step = Callable[[], Tensor]
"""Forward, backward and a step of the optimizer; gives the loss of the rows that this rank has, or of all."""
CHECKED, WARMING, BLOCKS = 3, 5, 3


class Attention(nn.Module):
    """Causal attention that asks its layers how many heads they give, as modules do that are split over ranks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(-2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """4 layers of width 256 and 4 heads: ids [rows, 128] of 8,192 words -> logits."""

    def __init__(self, vocabulary: int = 8192, width: int = 256, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def perceptron() -> tuple[nn.Module, Batch]:
    from shardwright.training.zoo import Perceptron

    return Perceptron(784, [512, 512], 10), (torch.randn(64, 1, 28, 28), torch.randint(10, (64,)))


def resnet18() -> tuple[nn.Module, Batch]:
    from shardwright.training.zoo import resnet18 as made

    return made(width=16), (torch.randn(64, 3, 32, 32), torch.randint(10, (64,)))


def transformer() -> tuple[nn.Module, Batch]:
    ids = torch.randint(8192, (8, 129))
    return Transformer(), (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


@dataclass(frozen=True)
class Trained:
    """A model as it is made, its layers for ways that ask for them, and the steps of a block that is timed."""

    make: Callable[[], tuple[nn.Module, Batch]]
    layers: Callable[[Any], Sequence[nn.Module]]
    steps: int


MODELS: Mapping[str, Trained] = {
    "perceptron": Trained(perceptron, lambda model: [m for m in model.layers if isinstance(m, nn.Linear)], 60),
    "resnet18": Trained(resnet18, lambda model: [block for stage in model.stages for block in stage], 4),
    "transformer": Trained(transformer, lambda model: model.layers, 2),
}


def loss_fn(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


@dataclass(frozen=True)
class Case:
    """A model with one global batch on one of so many ranks."""

    model: Any
    batch: Batch
    layers: Sequence[nn.Module]
    rank: int
    size: int
    compiled: bool = False
    fused: bool = False

    @staticmethod
    def of(name: str, dtype: torch.dtype, compiled: bool = False, fused: bool = False) -> Case:
        return Case.made(MODELS[name], dtype, compiled, fused)

    @staticmethod
    def made(trained: Trained, dtype: torch.dtype, compiled: bool = False, fused: bool = False) -> Case:
        torch.manual_seed(0)
        model, (x, y) = trained.make()
        x = x.to(dtype) if x.is_floating_point() else x
        place = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return Case(model.to(dtype), (x, y), trained.layers(model), *place, compiled, fused)

    @property
    def rows(self) -> Batch:
        """This rank's part of the batch."""
        x, y = (part.chunk(self.size)[self.rank] for part in self.batch)
        return x, y

    def as_run(self, model: Any) -> Any:
        return torch.compile(model) if self.compiled else model

    def adamw(self, model: Any) -> torch.optim.Optimizer:
        if not self.fused:
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        kinds: dict[bool, list[Any]] = {}  # a fused kernel takes no DTensors beside plain tensors
        for parameter in model.parameters():
            kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
        return torch.optim.AdamW([{"params": alike} for alike in kinds.values()], lr=1e-3, fused=True)


def looped(
    loss_of: Callable[[], Tensor], optimizer: Any, backward: Callable[[Tensor], object] = Tensor.backward
) -> Step:
    def step() -> Tensor:
        loss = loss_of()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain(case: Case) -> Step:
    """PyTorch without other ranks: the limit."""
    model, rows = case.as_run(case.model), case.rows
    return looped(lambda: loss_fn(model, rows), case.adamw(model))


# The rivals.


def meet() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def ddp(case: Case) -> Step:
    meet()
    model, rows = case.as_run(nn.parallel.DistributedDataParallel(case.model)), case.rows
    return looped(lambda: loss_fn(model, rows), case.adamw(model))


def fsdp2(case: Case) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    meet()
    mesh = init_device_mesh("cpu", (case.size,))
    for layer in case.layers:
        fully_shard(layer, mesh=mesh)
    model, rows = fully_shard(case.model, mesh=mesh), case.rows
    return looped(lambda: loss_fn(model, rows), case.adamw(model))


def accelerate(case: Case) -> Step:
    from accelerate import Accelerator

    accelerator, rows = Accelerator(cpu=True), case.rows
    model, optimizer = accelerator.prepare(case.model, case.adamw(case.model))
    return looped(lambda: loss_fn(model, rows), optimizer, accelerator.backward)


def fabric(case: Case) -> Step:
    from lightning.fabric import Fabric

    runs, rows = Fabric(accelerator="cpu", devices=case.size, strategy="ddp"), case.rows
    runs.launch()
    model, optimizer = runs.setup(case.model, case.adamw(case.model))
    return looped(lambda: loss_fn(model, rows), optimizer, runs.backward)


def dtensor(case: Case) -> Step:
    """Megatron's columns, then rows, by torch's tensor parallelism; each rank has the whole batch."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    meet()
    mesh = init_device_mesh("cpu", (case.size,))
    if isinstance(case.model, Transformer):
        whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
        of_layers: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        of_layers |= {"attention": whole, "attention.out": RowwiseParallel()}
        of_layers |= {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in case.layers:
            parallelize_module(layer, mesh, of_layers)
        ends = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        model, losses_split = parallelize_module(case.model, mesh, ends), loss_parallel
    else:
        ends = {"layers.0": ColwiseParallel(), "layers.2": RowwiseParallel()}
        model, losses_split = parallelize_module(case.model, mesh, ends), nullcontext
    optimizer = case.adamw(model)

    def step() -> Tensor:
        with losses_split():
            loss = loss_fn(model, case.batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# Ours.


def ours(case: Case, **options: Any) -> Step:
    import shardwright as sw

    sw.init()
    how = {"mode": "data", "batch": "local", **options} | ({"compile": True} if case.compiled else {})
    given = case.batch if how["batch"] == "global" else case.rows
    parallel = sw.parallelize(case.model, loss_fn, given, **how)
    return looped(lambda: parallel(given), case.adamw(parallel))


def ours_auto(case: Case) -> Step:
    return ours(case, mode="auto")


def ours_per_replica(case: Case) -> Step:
    """With batch statistics of each rank's own rows, as the rivals have them."""
    return ours(case, batch_norm="per-replica")


def ours_planned(case: Case, name: str, inputs: Any, batch: str) -> Step:
    """By the plan that goes by a name."""
    import shardwright as sw
    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.baselines import BASELINES
    from shardwright.compiler.plan.pricing.graph import RuledGraph
    from shardwright.compiler.plan.request import PlanRequest

    sw.init()
    graph = RuledGraph.of(captured_step(case.model, loss_fn, case.batch, {}))
    plan = BASELINES[name](graph, PlanRequest(Mesh.of(ranks=case.size), inputs=inputs))
    return ours(case, plan=plan, batch=batch)


def ours_tensor(case: Case) -> Step:
    return ours_planned(case, "tensor parallel", "whole", "global")


def ours_sharded(case: Case) -> Step:
    return ours_planned(case, "fully sharded", "split", "local")


WAYS: Mapping[str, Callable[[Case], Step]] = {
    "ours": ours, "ours-auto": ours_auto, "ours-per-replica": ours_per_replica, "ours-tensor": ours_tensor,
    "ours-sharded": ours_sharded, "ddp": ddp, "fsdp2": fsdp2, "accelerate": accelerate, "fabric": fabric,
    "dtensor": dtensor,
}  # fmt: skip


def mean_loss(step: Step) -> float:
    """The loss of the global batch in one more step."""
    loss = step()
    mine = (loss.full_tensor() if isinstance(loss, DTensor) else loss).double().clone()
    dist.all_reduce(mine)
    return mine.item() / dist.get_world_size()


def checked(name: str, way: str, compiled: bool, fused: bool) -> dict[str, list[float]]:
    """The losses of some steps in float64, and those of plain PyTorch on one device."""
    step = WAYS[way](Case.of(name, torch.float64, compiled, fused))
    losses = [mean_loss(step) for _ in range(CHECKED)]
    alone = plain(replace(Case.of(name, torch.float64), rank=0, size=1))
    return {"losses": losses, "alone": [alone().item() for _ in range(CHECKED)]}


def timed(step: Step, steps: int) -> list[tuple[float, float]]:
    """Seconds of each step, and the processor's."""
    dist.barrier()
    took = []
    for _ in range(steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        took.append((time.perf_counter() - start, time.process_time() - start_cpu))
    return took


def slowest(times: Sequence[float]) -> float:
    """The median of the times of a rank, the largest of all ranks."""
    found = torch.tensor(statistics.median(times), dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def measured(name: str, way: str, compiled: bool, fused: bool) -> dict[str, float]:
    """Seconds of a step, and of one without other ranks, in turn; and the processor's."""
    step, alone = (made(Case.of(name, torch.float32, compiled, fused)) for made in (WAYS[way], plain))
    steps, took = MODELS[name].steps, {"step": list[tuple[float, float]](), "limit": list[tuple[float, float]]()}
    for block in range(BLOCKS + 1):
        for key, one in (("step", step), ("limit", alone)):
            found = timed(one, steps if block else WARMING)
            took[key] += found if block else []
    clocks = {"s": 0, "cpu_s": 1}
    return {f"{key}_{clock}": slowest([t[i] for t in of]) for key, of in took.items() for clock, i in clocks.items()}


def around(name: str) -> dict[str, float]:
    """Seconds of the CPU that a call of ours takes beside the program, whose outputs are those of an earlier call."""
    import shardwright as sw
    from shardwright.runtime.programs.execute import Execution

    sw.init()
    case = Case.of(name, torch.float32)
    rows = case.rows
    parallel = sw.parallelize(case.model, loss_fn, rows, mode="data", batch="local")
    outputs: dict[Execution, Any] = {}
    run = Execution.__call__

    def known(execution: Execution, arguments: Any) -> Any:
        return outputs.get(execution) or outputs.setdefault(execution, run(execution, arguments))

    Execution.__call__ = known  # type: ignore[method-assign]
    took = []
    for _ in range(30):
        start = time.process_time()
        for _ in range(100):
            parallel(rows)
        took.append((time.process_time() - start) / 100)
    return {"around_s": statistics.median(took)}


def add_one_rank(parser: argparse.ArgumentParser) -> None:
    """What `step.Jobs` tells every rank of a script; who types a command types none of it."""
    for word in ("--model", "--way"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_one_rank(parser)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--fused", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.way == "around":
        answer: dict[str, Any] = around(options.model)
    else:
        asked = options.model, options.way, options.compiled, options.fused
        answer = checked(*asked) if options.check else {}
        answer |= measured(*asked) | {"backend": dist.get_backend()}
    if int(os.environ["RANK"]) == 0:
        options.answer.write_text(json.dumps(answer))
    if not options.way.startswith(("ours", "around")):
        dist.destroy_process_group()
        os._exit(0)  # one in some such processes of torch's own aborts where Python is finalised


if __name__ == "__main__":
    main()
