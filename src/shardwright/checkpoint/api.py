"""`sw.checkpoint.save` and `sw.checkpoint.load`: a whole run to a directory of checkpoints, and back.

What is saved of each thing that is given, and where it stands in the checkpoint:

    model       parameters and buffers (("model", NAME)); what its random numbers depend on (("run", "random"))
    optimizer   its state by the names of parameters, and its groups (see `checkpoint.state`)
    ema         averaged parameters, laid out as the parameters are (("ema", NAME))
    loader      the position in the data; scheduler, scaler: their state_dict (("run", ...))
    extra       any other values (("run", "extra"))
    always      the random generators of every rank (("run", "generators"))

`shardwright.checkpoint` knows nothing of how models are trained: it takes a model from `sw.parallelize`, torch's
DistributedDataParallel or a plain module, and whatever else has ``state_dict`` and ``load_state_dict``.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.optim import Optimizer

from shardwright.checkpoint.load import load as fill
from shardwright.checkpoint.manifest import Entry, TensorEntry, ValueEntry
from shardwright.checkpoint.match import Rename, parameter_at, renamer
from shardwright.checkpoint.ranks import Lost, OneRank, ProcessRanks, Ranks
from shardwright.checkpoint.retention import Retention
from shardwright.checkpoint.save import save as write
from shardwright.checkpoint.source import Source, open_source
from shardwright.checkpoint.state import (
    broadcast_buffers,
    empty_optimizer_state,
    match_groups,
    model_state,
    module_of,
    optimizer_state,
    put_model_state,
    put_optimizer_state,
    put_random_state,
    random_state,
)
from shardwright.checkpoint.store import Store
from shardwright.errors import CheckpointError, ShardwrightError, UsageError

T = TypeVar("T")
Where = str | os.PathLike[str]
Path = tuple[str, ...]
Best = tuple[str, int, Literal["min", "max"]]

_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


class Stateful(Protocol):
    """A loader, a schedule, a scaler."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class RandomState(UserWarning):
    """The generators of the ranks cannot be what they were."""


@dataclass(frozen=True)
class Loaded:
    """What `load` found beside what it put into its arguments.

    ``name`` is the checkpoint's, ``skipped`` what did not fit, with ``strict=False``.
    """

    name: str
    step: int
    epoch: int
    metrics: Mapping[str, float]
    extra: Any
    skipped: tuple[str, ...] = ()


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

    def state(self) -> dict[Path, Any]:
        """Everything but the generators, as it is now: the tensors are the run's own."""
        module = module_of(self.model)
        found = model_state(module)
        if self.optimizer is not None:
            found |= optimizer_state(self.optimizer, module)
            found["run", "optimizer"] = type(self.optimizer).__name__
        found |= self.averages()
        found |= {("run", name): thing.state_dict() for name, thing in self.others.items()}
        if hasattr(self.model, "random_state"):
            found["run", "random"] = self.model.random_state()
        return found

    def averages(self) -> dict[Path, Any]:
        if self.ema is None:
            return {}
        tensors = self.ema if isinstance(self.ema, Mapping) else self.ema.state_dict()
        return {("ema", name): tensor for name, tensor in tensors.items()}


def save(
    directory: Where,
    parallel: Any,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    *,
    step: int,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Any = None,
    epoch: int = 0,
    metrics: Mapping[str, float] | None = None,
    extra: Any = None,
    config: str | Mapping[str, Any] | None = None,
    latest_k: int | None = None,
    top_k: Best | None = None,
) -> str:
    """Save a run as the checkpoint ``step-00000100`` in ``directory``; all ranks call it together.

    Args:
        directory: of the run, made where it is not there; one run at a time saves into it.
        parallel: what `sw.parallelize` returned, a DistributedDataParallel, or a plain module that is whole and the
            same on every rank.
        optimizer: over the parameters of the model, in any groups.
        loader: from `sw.loader`, or anything else with ``state_dict`` and ``load_state_dict``, the same on every rank.
        step: optimizer steps done, which name the checkpoint; one of the same name is replaced.
        scheduler, scaler: as ``loader``.
        ema: averaged parameters: names to tensors, or something whose ``state_dict()`` gives them (`sw.EMA`,
            torch's AveragedModel). Their memory is what is loaded into.
        epoch: epochs begun.
        metrics: scores by which ``top_k`` chooses.
        extra: numbers, strings, tensors, and lists and dictionaries of them.
        config: text, or a mapping, kept as ``config.yaml``.
        latest_k: keep so many of the newest checkpoints, by default all.
        top_k: ``("accuracy", 3, "max")`` keeps beside them the three best by a metric.

    Returns the name of the checkpoint.

    Raises:
        CheckpointError: the same on every rank; the directory then has the checkpoints that it had before.
    """
    run = Run(parallel, optimizer, loader, scheduler, scaler, ema)
    ranks = all_ranks()
    state = together(ranks, lambda: whole_state(run, extra))
    state["run", "generators"] = _generators(ranks)
    store = Store(os.fspath(directory), retention=retention(latest_k, top_k))
    name = name_of(step)
    write(store, name, state, info(run, step, epoch, metrics), run_files(run, config), ranks)
    return name


def load(
    directory: Where,
    parallel: Any,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    *,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    ema: Any = None,
    strict: bool = True,
    rename: Rename | None = None,
) -> Loaded:
    """Load the newest checkpoint of a directory, or the one at a path, into a run as `save` takes it; in place.

    The number of ranks, the mode and the plan may be others than those that saved; each rank reads what it needs. What
    is not passed is not loaded, so that a model can be loaded alone.

    Args:
        strict: refuse a checkpoint that does not fit, naming all that is missing, unknown or of another shape; with
            False load what fits, and return the names of the rest in `Loaded.skipped`.
        rename: how parameters of the checkpoint are called here, ``{"encoder.*": "backbone.*"}``, or a function.

    Torch's, numpy's and Python's generators are set as they were on each rank. Where they differed between ranks and
    the number of ranks is another, ranks get new ones, with a `RandomState` warning: what draws by them (a model that
    runs by DistributedDataParallel) then draws other numbers than in an uninterrupted run.

    Raises:
        CheckpointError: the same on every rank, where there is no checkpoint, it does not fit, or is damaged. Damage
            of a tensor shows while it is read: the model is then partly loaded.
        UsageError: where ``loader`` has other data, or ``rename`` fits nothing.
    """
    run = Run(parallel, optimizer, loader, scheduler, scaler, ema)
    ranks = all_ranks()
    where = ranks.broadcast(_told(lambda: open_source(directory).where) if ranks.rank == 0 else None)
    source = together(ranks, lambda: open_source(_untold(where)))
    plan = together(ranks, lambda: _Loading.of(source, run, strict, rename))
    skipped = together(ranks, plan.fill)
    plan.put(ranks)
    about = source.manifest.info
    name = source.where.rstrip("/").rsplit("/", 1)[-1]
    return Loaded(name, about["step"], about["epoch"], about["metrics"], plan.values.get("extra"), skipped)


# Saving


def name_of(step: int) -> str:
    """The name of the checkpoint after so many steps."""
    if step < 0:
        raise UsageError(f"expected step, the optimizer steps done, to be at least 0, got {step}")
    return f"step-{step:08d}"


def retention(latest_k: int | None, top_k: Best | None) -> Retention:
    """What `Store` is to keep."""
    if top_k is None:
        return Retention(latest_k)
    metric, count, mode = top_k
    return Retention(latest_k, count, metric, mode)


def whole_state(run: Run, extra: Any) -> dict[Path, Any]:
    """What is saved of a run but for the generators, which the ranks have to compare."""
    broadcast_buffers(run.model)
    state = run.state()
    if extra is not None:
        state["run", "extra"] = extra
    return state


def info(run: Run, step: int, epoch: int, metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """What the manifest says about a run, for people."""
    found: dict[str, Any] = {"step": step, "epoch": epoch, "metrics": {k: float(v) for k, v in (metrics or {}).items()}}
    plan = getattr(run.model, "plan", None)
    if plan is not None:
        found |= {"mode": plan.mode, "mesh": str(plan.named)}
    return {**found, "python": platform.python_version()}


def run_files(run: Run, config: str | Mapping[str, Any] | None) -> dict[str, bytes]:
    """What lies beside the tensors: the plan, for `sw.parallelize(plan=...)`, and the configuration."""
    found = {}
    plan = getattr(run.model, "plan", None)
    if plan is not None:
        found["plan.json"] = plan.to_json().encode()
    if config is not None:
        found["config.yaml"] = (config if isinstance(config, str) else yaml.safe_dump(dict(config))).encode()
    return found


def _generators(ranks: Ranks) -> list[dict[str, Any]]:
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


# Loading


@dataclass(frozen=True)
class _Loading:
    """A load that fits, as far as can be known before any tensor is read. Nothing has been changed so far."""

    source: Source
    run: Run
    wanted: Mapping[Path, Any]
    groups: list[Mapping[str, Any]] | None
    values: Mapping[str, Any]
    strict: bool
    rename: Rename | None

    @staticmethod
    def of(source: Source, run: Run, strict: bool, rename: Rename | None) -> _Loading:
        entries = {entry.path: entry for entry in source.manifest.entries.values()}
        values = {p[1]: source.value(e) for p, e in entries.items() if p[0] == "run" and isinstance(e, ValueEntry)}
        for name in run.others:
            if strict and name not in values:
                raise CheckpointError(
                    f"{source.where} has no {name}: it was saved without one; leave out {name}=, or type strict=False"
                )
        module = module_of(run.model)
        wanted: dict[Path, Any] = {**model_state(module), **run.averages()}
        groups = None
        if run.optimizer is not None:
            renamed = _renamed(entries, rename)
            saved = _saved_groups(source, renamed, rename, entries)
            if saved:
                groups = match_groups(run.optimizer, module, saved, values.get("optimizer", "an optimizer"), strict)
                wanted |= empty_optimizer_state(run.optimizer, module, renamed)
                wanted |= {("optimizer", "param_groups", str(i)): None for i in range(len(saved))}
            elif strict:
                raise CheckpointError(
                    f"{source.where} has no optimizer: it was saved without one; load it without optimizer=, or type "
                    "strict=False to begin with a new one"
                )
        if strict:
            _check_tied(source, {entry.path: entry for entry in _renamed(entries, rename)}, wanted)
        if run.loader is not None and "loader" in values:
            run.loader.load_state_dict(values["loader"])
        return _Loading(source, run, wanted, groups, values, strict, rename)

    def fill(self) -> tuple[str, ...]:
        """Read the tensors; the names of what is not loaded."""
        found = fill(self.source, self.wanted, strict=self.strict, rename=self.rename)
        values = {path: found.values.get(path, value) for path, value in self.wanted.items()}
        put_model_state(module_of(self.run.model), values)
        if self.run.optimizer is not None and self.groups is not None:
            put_optimizer_state(self.run.optimizer, module_of(self.run.model), self.groups, values)
        return (*found.match.missing, *found.match.extra, *found.match.differing)

    def put(self, ranks: Ranks) -> None:
        """The values, once all ranks have their tensors."""
        for name in ("scheduler", "scaler"):
            if name in self.run.others and self.values.get(name):
                self.run.others[name].load_state_dict(self.values[name])
        if hasattr(self.run.model, "load_random_state") and "random" in self.values:
            self.run.model.load_random_state(self.values["random"])
        if "generators" in self.values:
            _put_generators(self.values["generators"], ranks)


def _check_tied(source: Source, entries: Mapping[Path, Entry], wanted: Mapping[Path, Any]) -> None:
    """Raises `CheckpointError` where names of one tensor here are names of different ones in the checkpoint."""
    first: dict[int, Path] = {}
    for path, tensor in wanted.items():
        one, other = entries.get(first.setdefault(id(tensor), path)), entries.get(path)
        if isinstance(tensor, Tensor) and isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
            contents = [[(c.box, c.place.checksums) for c in entry.chunks] for entry in (one, other)]
            if contents[0] != contents[1]:
                raise CheckpointError(
                    f"{one.name} and {other.name} are one tensor here (tied), but two that differ in {source.where}; "
                    "build the model as it was saved, or type strict=False to take the second"
                )


def _renamed(entries: Mapping[Path, Entry], rename: Rename | None) -> list[Entry]:
    apply = _renamer(entries, rename)
    found = []
    for path, entry in entries.items():
        at = parameter_at(path)
        found.append(entry if at is None else replace(entry, path=(*path[:at], apply(path[at]), *path[at + 1 :])))
    return found


def _renamer(entries: Mapping[Path, Entry], rename: Rename | None) -> Callable[[str], str]:
    at = {path: parameter_at(path) for path in entries}
    return renamer(rename, dict.fromkeys(path[i] for path, i in at.items() if i is not None))


def _saved_groups(
    source: Source, entries: list[Entry], rename: Rename | None, named: Mapping[Path, Entry]
) -> list[Mapping[str, Any]]:
    apply = _renamer(named, rename)
    found = [e for e in entries if e.path[:2] == ("optimizer", "param_groups") and isinstance(e, ValueEntry)]
    groups = [source.value(entry) for entry in sorted(found, key=lambda entry: int(entry.path[2]))]
    return [{**group, "params": [apply(name) for name in group["params"]]} for group in groups]


def _put_generators(saved: list[Mapping[str, Any]], ranks: Ranks) -> None:
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


# Ranks


def all_ranks() -> Ranks:
    """The ranks of the default process group, or this process alone.

    Their messages go by gloo, also where collectives go by NCCL: the first call there makes a group, on all ranks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    if "gloo" in str(dist.get_backend()):
        return ProcessRanks()
    world = dist.group.WORLD
    assert world is not None
    if world not in _groups:
        _groups[world] = dist.new_group(backend="gloo")
    return ProcessRanks(_groups[world])


def together(ranks: Ranks, do: Callable[[], T]) -> T:
    """What ``do()`` returns on each rank; where it fails on some rank, all raise the first one's error."""
    answer = _told(do)
    failures = ranks.gather(answer.failure)
    failure = None
    for rank, found in enumerate(failures or ()):
        if isinstance(found, Lost):
            found = CheckpointError(f"rank {rank} {found}")
        failure = failure or found
    failure = ranks.broadcast(failure)
    if failure is not None:
        raise failure
    if answer.failure is not None:
        raise answer.failure
    result: T = answer.result
    return result


@dataclass(frozen=True)
class _Told:
    """How a call ended, in a form that travels."""

    failure: Exception | None = None
    result: Any = None


def _told(do: Callable[[], Any]) -> _Told:
    try:
        return _Told(None, do())
    except ShardwrightError as error:
        return _Told(type(error)(*error.args))
    except Exception as error:
        return _Told(CheckpointError(f"{type(error).__name__}: {error}"))


def _untold(told: _Told) -> Any:
    if told.failure is not None:
        raise told.failure
    return told.result
