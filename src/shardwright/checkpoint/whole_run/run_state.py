"""The state of a run in a checkpoint: what is saved of each of its objects, and under which names.

model       parameters and buffers (("model", NAME)); what its random numbers depend on (("run", "random"))
optimizer   its state by the names of parameters, and its groups (see `checkpoint.state`)
ema         averaged parameters, laid out as the parameters are (("ema", NAME))
loader      the position in the data; scheduler, scaler: their state_dict (("run", ...))
extra       any other values (("run", "extra"))
always      the random generators of every rank (("run", "generators"))
"""

from __future__ import annotations

import hashlib
import pickle
import platform
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import yaml
from torch import Tensor
from torch.optim import Optimizer

from shardwright.checkpoint.whole_run.state import (
    Path,
    broadcast_buffers,
    model_state,
    module_of,
    optimizer_state,
    parallelized,
    put_random_state,
    random_state,
)
from shardwright.compiler.plan.plan import Plan
from shardwright.distributed.ranks import Ranks
from shardwright.errors import UsageError


class Stateful(Protocol):
    """A loader, a schedule, a scaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class RandomState(UserWarning):
    """The generators of the ranks cannot be what they were."""


@dataclass(frozen=True)
class Run:
    """The things of which a checkpoint is made, or into which it is loaded."""

    model: Any
    optimizer: Optimizer | None = None
    loader: Stateful | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    ema: Any = None
    others: Mapping[str, Stateful] = field(init=False)

    def __post_init__(self) -> None:
        named = {"loader": self.loader, "scheduler": self.scheduler, "scaler": self.scaler}
        object.__setattr__(self, "others", {name: thing for name, thing in named.items() if thing is not None})
        ours = parallelized(self.model)
        if ours is not None and isinstance(self.optimizer, Optimizer):
            ours.adopt(self.optimizer)  # it may have been made before

    def state(self) -> dict[Path, Any]:
        """Everything but the generators, as it is now: the tensors are the run's own."""
        module = module_of(self.model)
        found = model_state(module)
        if self.optimizer is not None:
            found |= optimizer_state(self.optimizer, module)
            found["run", "optimizer"] = type(self.optimizer).__name__
        found |= self.averages()
        found |= {("run", name): thing.state_dict() for name, thing in self.others.items()}
        ours = parallelized(self.model)
        random_numbers = None if ours is None else ours.random_state()
        if random_numbers is not None:
            found["run", "random"] = random_numbers
        return found

    @property
    def plan(self) -> Plan | None:
        ours = parallelized(self.model)
        return None if ours is None else ours.plan

    def averages(self) -> dict[Path, Any]:
        if self.ema is None:
            return {}
        tensors = self.ema if isinstance(self.ema, Mapping) else self.ema.state_dict()
        return {("ema", name): tensor for name, tensor in tensors.items()}


def steady(run: Run, state: Mapping[Path, Any]) -> set[Path]:
    """Return what of ``state`` nothing changes before the next step of the optimizer, if there is one of torch's.

    Averages change after the step; where a scaler may skip it, at any time. An embedding with ``max_norm`` changes
    its weight in the forward.
    """
    if not isinstance(run.optimizer, Optimizer):
        return set()
    stepped = {id(parameter) for group in run.optimizer.param_groups for parameter in group["params"]}
    for module in module_of(run.model).modules():
        if getattr(module, "max_norm", None) is not None:
            stepped -= {id(parameter) for parameter in module.parameters()}
    skips = run.scaler is not None and getattr(run.scaler, "is_enabled", lambda: True)()
    found = set()
    for path, value in state.items():
        of_optimizer = path[:2] == ("optimizer", "state") or (path[0] == "model" and id(value) in stepped)
        if isinstance(value, Tensor) and (of_optimizer or (path[0] == "ema" and not skips)):
            found.add(path)
    return found


def name_of(step: int) -> str:
    """Return the name of the checkpoint after ``step`` optimizer steps; a negative number raises `UsageError`."""
    if step < 0:
        raise UsageError(f"expected step, the optimizer steps done, to be at least 0, got {step}")
    return f"step-{step:08d}"


def whole_state(run: Run, extra: Any) -> dict[Path, Any]:
    """Return what is saved of a run but for the generators, which the ranks have to compare."""
    broadcast_buffers(run.model)
    state = run.state()
    if extra is not None:
        state["run", "extra"] = extra
    return state


def info(run: Run, step: int, epoch: int, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """Return what the manifest says about a run, for people."""
    found: dict[str, Any] = {"step": step, "epoch": epoch, "metrics": {k: float(v) for k, v in (metrics or {}).items()}}
    plan = run.plan
    if plan is not None:
        found |= {"mode": plan.mode, "mesh": str(plan.named)}
    return {**found, "python": platform.python_version()}


def run_files(run: Run, config: str | Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the values beside the tensors: the plan, for `sw.parallelize(plan=...)`, and the configuration."""
    found = {}
    if run.plan is not None:
        found["plan.json"] = run.plan.to_json().encode()
    if config is not None:
        found["config.yaml"] = (config if isinstance(config, str) else yaml.safe_dump(dict(config))).encode()
    return found


def generators(ranks: Ranks) -> list[dict[str, Any]]:
    """The generators of every rank, or one for all where they are the same; of use on rank 0 alone."""
    mine = random_state()
    keys = [
        mine["python"],
        mine["numpy"][1].numpy(),
        mine["numpy"][2:],
        *(mine[n].numpy() for n in mine if n in ("torch", "cuda")),
    ]
    digests = ranks.gather(hashlib.sha256(pickle.dumps(keys)).digest())
    if ranks.broadcast(digests is not None and len(set(digests)) == 1):
        return [mine]
    return ranks.gather(mine) or [mine]


def put_generators(saved: list[Mapping[str, Any]], ranks: Ranks) -> None:
    """Set this rank's generators as saved; with another number of ranks, seed them from what was saved, and warn."""
    if len(saved) in (1, ranks.size):
        put_random_state(saved[ranks.rank if len(saved) == ranks.size else 0])
        return
    if ranks.rank == 0:
        warnings.warn(
            RandomState(
                f"the checkpoint has the random generators of {len(saved)} ranks, which differed; {ranks.size} ranks "
                "get new ones, which depend on them: what draws by them goes on with other numbers"
            ),
            stacklevel=4,
        )
    text = hashlib.sha256(bytes(saved[0]["torch"].tolist()) + f"{ranks.size} {ranks.rank}".encode()).digest()
    seed = int.from_bytes(text[:4], "little")
    random.seed(seed)
    torch.manual_seed(seed)
