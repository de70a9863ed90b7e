"""A model that cannot be captured, run by torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.compiler.capture.tracing.state.restored import python_restored
from shardwright.compiler.plan.searches import Mode
from shardwright.data.loading.batch import Batch
from shardwright.data.loading.samples import count_samples, map_tensors, part_of_batch
from shardwright.data.order import chunk_range
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.gradients import Reduction
from shardwright.distributed.lockstep import Lockstep, Turns
from shardwright.distributed.seed import random_numbers_kept
from shardwright.distributed.world import World, current_world
from shardwright.errors import UsageError
from shardwright.runtime.checks.changed_buffers import buffers_restored
from shardwright.runtime.checks.check import Checks
from shardwright.runtime.checks.replicas import Replicas
from shardwright.runtime.checks.same_batch import SameBatch
from shardwright.runtime.eager import DataParallelStep, LossFn
from shardwright.runtime.eager_predict import Prediction
from shardwright.runtime.evaluation import metric_sums_over_ranks
from shardwright.runtime.graphs.unchanged import Structure
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.programs.batches import tensors_of
from shardwright.runtime.programs.execute import Execution
from shardwright.runtime.programs.inputs import BatchKind
from shardwright.runtime.trying.mean_check import problem_with_mean, problem_with_state


def parallelize_eagerly(
    model: nn.Module,
    loss_fn: LossFn,
    sample_batch: Any,
    mode: Mode = "data",
    gradients: Reduction = "mean",
    batch: BatchKind | None = None,
    predict_fn: LossFn | None = None,
    checks: Checks = "usual",
) -> EagerParallel:
    """`sw.parallelize` without a capture, for the modes "data" and "single", with the arguments that it knows.

    The loss must be a mean over the samples of its batch, and batch normalisation sees each rank's own samples.

    Raises `UsageError`, on all ranks, when something does not fit on any of them, before anything has started.
    """
    world = current_world()
    lockstep = Lockstep() if mode == "single" else Lockstep.of_all_ranks()
    splitter = _Splitter(mode, batch, world)
    trial = _agree(_try(model, loss_fn, sample_batch, splitter), (mode, gradients, batch), world)
    model.to(world.device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    step = DataParallelStep(
        model,
        loss_fn,
        ranks=1 if mode == "single" else world.size,
        gradient_scale=world.size if gradients == "sum" else 1,
        used=frozenset(trial.used),
        changing=trial.changing,
        left=trial.left,
        returns_aux=trial.returns_aux,
        lockstep=lockstep,
    )
    if predict_fn is None and trial.returns_aux:
        predict_fn = lambda model, part: loss_fn(model, part)[1]  # noqa: E731
    return EagerParallel(model, loss_fn, step, splitter, predict_fn, lockstep, trial.left, checks)


class EagerParallel(ParallelModel):
    """A model that was not captured, as `parallelize_eagerly` makes it.

    Of what the loss function returns beside the loss, each rank gets that of its own part, None for an empty one.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        step: DataParallelStep,
        splitter: _Splitter,
        predict_fn: LossFn | None,
        lockstep: Lockstep,
        left: Sequence[str],
        checks: Checks = "usual",
    ) -> None:
        super().__init__(model, lockstep)
        self._loss_fn, self._left = loss_fn, left
        self._tried = {model.training}  # the modes in which the loss is known to be a mean over samples
        self._predict_fn = predict_fn
        self._prediction = Prediction(self._predict_part, splitter.world.device)
        self._trained = _trained(model)
        self.plan = None
        self._step = step
        self._splitter = splitter
        self._structure, self._turns = Structure(model), Turns(always=checks == "full")
        self._same_batch = SameBatch(lockstep, splitter.world.device, self._turns)
        # Without buffers: the forward gives all ranks those of rank 0, and compares what it changes of them.
        together, failed = splitter.mode != "single", self._failed_in_step
        device = splitter.world.device
        self._replicas = Replicas(model, (), lockstep, device, self._turns, together=together, failed=failed)
        self._pulse.steps.communicating_s = None  # torch reduces the gradients, and does not say for how long

    def __call__(self, batch: Any) -> Any:
        """The loss of the global batch, or ``(loss, aux)``; in training mode it is one more step."""
        with self._lockstep.call():
            self._refuse_failed()
            return self._called(batch)

    def _called(self, batch: Any) -> Any:
        if self.module.training:
            self._pulse.begin_step()
        else:
            self._pulse.beat()
        self._pulse.set_stage(0)
        self._refuse_changes()
        self._turns.next()
        tensors = tensors_of(batch)
        if self._splitter.kind == "global" and not isinstance(batch, Batch):
            self._same_batch.before(tensors)
        self._replicas.before()
        part, global_size = self._splitter.split(batch)
        if self.module.training not in self._tried:
            self._try_mode(part)
        try:
            result = self._step(part, global_size)
        except Exception as error:
            self._failed_in_step(error)
            raise
        if self.module.training:
            self._tell_computed(global_size or 0, result[0] if isinstance(result, tuple) else result)
        return result

    def _try_mode(self, part: Any) -> None:
        """Check that the loss is a mean over samples in a mode of the model that was not there before.

        Raises:
            UsageError: on all ranks, which come here together, where it is none on one of them.
        """
        if self._splitter.mode == "data" and self._splitter.world.size > 1:
            count, device = count_samples(part), self._splitter.world.device
            problem = _problem_with_parts(self.module, self._loss_fn, part, device, self._left) if count else None
            for rank, theirs in enumerate(from_all_ranks(problem)):
                if theirs:
                    mode = "training" if self.module.training else "evaluation"
                    raise UsageError(f"rank {rank}: in {mode} mode, {theirs}")
        self._tried.add(self.module.training)

    def _predicted(self, batch: Any, gather: bool) -> Any:
        if self._predict_fn is None:
            raise UsageError(
                "predict gives what the loss function returns beside the loss, and it returns the loss alone; return "
                "(loss, outputs) from it, or pass sw.parallelize(..., predict_fn=function)"
            )
        part, global_size = self._splitter.split(batch)
        count = count_samples(part)
        if not gather or count == global_size:
            return self._predict_part(part) if count else None
        return self._prediction(part, count)

    def _predict_part(self, part: Any) -> Any:
        assert self._predict_fn is not None
        return self._predict_fn(self.module, part)

    def _refuse_changes(self) -> None:
        self._structure.before()
        if _trained(self.module) != self._trained:
            raise UsageError(
                "requires_grad of a parameter was changed after sw.parallelize, and this model runs by "
                "DistributedDataParallel, which reduces the gradients that it was made for; change it before, or "
                "parallelize the model again"
            )

    def samples(self, batch: Any) -> int:
        if isinstance(batch, Batch):
            return batch.global_size
        part, global_size = self._splitter.split(batch)
        if global_size is not None:
            return global_size
        return self._summed(count_samples(part))

    def _metrics(self, aux: Any, batch: Any, samples: int) -> Mapping[str, Tensor | float]:
        part, _ = self._splitter.split(batch)
        return metric_sums_over_ranks(aux, count_samples(part))

    def accumulate(self) -> AbstractContextManager[None]:
        return self._step.accumulate()

    def replay(self, batch: Any) -> None:
        """None, since a model that was not captured has no graph."""

    def executions(self) -> list[Execution]:
        """No programs, since torch runs the model as it is."""
        return []

    def close(self) -> None:
        """Say that no more calls come; it communicates in the default process group, which stays."""
        self._lockstep.end()

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the model, which is whole on every rank."""
        state = self.module.state_dict().items()
        return {name: value.detach() if isinstance(value, Tensor) else value for name, value in state}

    def random_state(self) -> None:
        """None, since random numbers come from torch's generators."""

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Do nothing: random numbers come from torch's generators, which checkpoints keep for every rank."""


@dataclass(frozen=True)
class _Splitter:
    """Finds this rank's part of a batch, on its device, and the size of the global batch where this rank knows it."""

    mode: Mode
    kind: BatchKind | None
    world: World

    def split(self, batch: Any) -> tuple[Any, int | None]:
        count = count_samples(batch)
        if count == 0 and not isinstance(batch, Batch) and (self.kind != "local" or self.mode == "single"):
            raise UsageError("the batch is empty; expected at least one sample")
        if not isinstance(batch, Batch) and self.kind is None and self.mode == "data" and self.world.size > 1:
            raise UsageError(
                f"nobody said how this batch of {count} samples is split over {self.world.size} ranks; pass "
                "parallelize(..., batch='local') when each rank passes its own part, batch='global' when all pass the "
                "same whole, or take batches from sw.loader"
            )
        if self.mode == "single":
            if isinstance(batch, Batch) and count != batch.global_size:
                raise UsageError(
                    f"mode='single' computes the whole batch on every rank, but this is one part of it: {batch!r}; "
                    "give sw.loader a world of one rank, or use mode='data'"
                )
            return self._move(batch), count
        if not isinstance(batch, Batch) and self.kind != "global":
            return self._move(batch), None if self.kind == "local" else count
        global_size = batch.global_size if isinstance(batch, Batch) else count
        start, stop = chunk_range(global_size, self.world.size, self.world.rank)
        if count == global_size:
            return self._move(part_of_batch(_plain(batch), start, stop)), global_size
        if (batch.start, batch.stop) != (start, stop):
            raise UsageError(
                f"rank {self.world.rank} of {self.world.size} computes samples {start} to {stop}, but got {batch!r}; "
                "take batches from sw.loader, made after sw.init()"
            )
        return self._move(batch), global_size

    def _move(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.world.device, non_blocking=True), batch)


def _trained(model: nn.Module) -> list[bool]:
    return [parameter.requires_grad for parameter in model.parameters()]


def _plain(batch: Any) -> Any:
    return tuple(batch) if isinstance(batch, Batch) else batch


@dataclass(frozen=True)
class _Trial:
    """The findings of trying the loss function on the sample batch: what does not fit, and what the loss depends on.

    ``samples`` is 0 where this rank's part is empty, so that only the other ranks' trials tell anything. ``changing``
    names the buffers that it changes, but for those of batch normalisation, and ``left`` the places in Python.
    """

    problem: str | None = None
    samples: int = 0
    used: tuple[str, ...] = ()
    returns_aux: bool = False
    parameters: tuple[tuple[str, tuple[int, ...], str], ...] = ()
    changing: frozenset[str] = frozenset()
    left: tuple[str, ...] = ()


def _try(model: nn.Module, loss_fn: LossFn, sample_batch: Any, splitter: _Splitter) -> _Trial:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    described = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    if not parameters:
        return _Trial(f"{type(model).__name__} has no parameter that requires a gradient; there is nothing to train")
    meta = [name for name, value in model.state_dict().items() if isinstance(value, Tensor) and value.is_meta]
    if meta:
        return _Trial(
            f"{len(meta)} tensors of the model are on the meta device ({', '.join(meta[:3])}, ...); give them values "
            "first: model.to_empty(device='cpu') and initialise them"
        )
    try:
        part, _ = splitter.split(sample_batch)
        samples = count_samples(part)
        if samples == 0:
            return _Trial(parameters=described)
        changing, left = set[str](), list[str]()
        result = _forward(model, loss_fn, [part], splitter.world.device, changing, left)
    except Exception as error:
        return _Trial(f"the sample batch does not fit: {type(error).__name__}: {error}")
    returns_aux = isinstance(result, tuple) and len(result) == 2
    loss = result[0] if returns_aux else result
    problem = _problem_with_loss(loss)
    if problem:
        return _Trial(problem)
    if splitter.mode == "data" and splitter.world.size > 1:
        problem = _problem_with_parts(model, loss_fn, part, splitter.world.device, left)
        if problem:
            return _Trial(problem)
    reached = _reached(loss)
    own = {id(parameter) for parameter in model.parameters()}
    beside = [found for found in reached.values() if isinstance(found, nn.Parameter) and id(found) not in own]
    if beside and splitter.mode == "data" and splitter.world.size > 1:
        return _Trial(
            f"the loss function uses a parameter of shape {list(beside[0].shape)} that is not one of the model it is "
            "given, whose gradient DistributedDataParallel would leave as it is on each rank; make modules with "
            "parameters, such as a learned loss, submodules of the model; on what is not trained call "
            "requires_grad_(False)"
        )
    used = tuple(name for name, parameter in parameters.items() if id(parameter) in reached)
    if not used:
        return _Trial(
            "the loss depends on no parameter of the model that requires a gradient; there is nothing to train"
        )
    return _Trial(None, samples, used, returns_aux, described, frozenset(changing), tuple(left))


def _problem_with_parts(
    model: nn.Module, loss_fn: LossFn, part: Any, device: torch.device, left: Sequence[str]
) -> str | None:
    """Return why parts of a batch do not make up the whole, in the mode of the model; None where they do.

    Args:
        left: places in Python that a step changes.
    """

    def loss_after(batches: Sequence[Any], seed: int) -> Any:
        return _forward(model, loss_fn, batches, device, seed=seed)

    problem = problem_with_mean(model, lambda batch, seed: loss_after([batch], seed), part)
    return problem or (problem_with_state(model, loss_after, part, left[0]) if left else None)


def _forward(
    model: nn.Module,
    loss_fn: LossFn,
    parts: Sequence[Any],
    device: torch.device,
    changed: set[str] | None = None,
    left: list[str] | None = None,
    seed: int | None = None,
) -> Any:
    """Return the loss function's result for the last part, after steps on the others, with the same buffers for each.

    The model's buffers, its gradients, what stands in Python and all random numbers are left as they were.

    Args:
        changed: is given the names of the buffers that a forward changes, but for those of batch normalisation.
        left: is given the places in Python that steps change.
        seed: of the random numbers; None for those that come next.
    """
    model.to(device)
    recording = torch.enable_grad() if model.training else nullcontext()
    with python_restored(model, loss_fn) as places:
        for part in parts:
            with (
                buffers_restored(model) as found,
                _gradients_restored(model),
                random_numbers_kept(seed, device),
                recording,
            ):
                result = loss_fn(model, part)
            if changed is not None:
                changed |= found
    if left is not None:
        left += places
    return result


@contextmanager
def _gradients_restored(model: nn.Module) -> Iterator[None]:
    """Leave the gradients as they were: a loss function may make a backward of its own, as a gradient penalty does."""
    before = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, gradient, copy in before:
                parameter.grad = gradient if gradient is None or copy is None else gradient.copy_(copy)


def _problem_with_loss(loss: Any) -> str | None:
    if not isinstance(loss, Tensor):
        return f"the loss function returned {type(loss).__name__}; expected a scalar tensor, or (scalar tensor, aux)"
    if loss.dim() != 0:
        return f"the loss has shape {list(loss.shape)}; expected a scalar, the mean over the samples: loss.mean()"
    if not loss.is_floating_point():
        return f"the loss has dtype {loss.dtype}; expected a floating-point number"
    if loss.grad_fn is None:
        return "the loss is not attached to the graph; compute it from model(x), without detach(), item() or no_grad()"
    return None


def _reached(loss: Tensor) -> dict[int, Tensor]:
    """The tensors whose gradients a backward from ``loss`` would leave, by their ids."""
    seen: set[Any] = set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [following for following, _ in node.next_functions]
    return {id(node.variable): node.variable for node in seen if hasattr(node, "variable")}


def _agree(trial: _Trial, arguments: tuple[Any, ...], world: World) -> _Trial:
    """The trial that stands for all ranks; raises the same `UsageError` on each when one of them has a problem."""
    everyone = from_all_ranks((trial, arguments))
    for rank, (theirs, _) in enumerate(everyone):
        if theirs.problem:
            raise UsageError(theirs.problem if world.size == 1 else f"rank {rank}: {theirs.problem}")
    first, first_arguments = everyone[0]
    for rank, (theirs, their_arguments) in enumerate(everyone):
        if their_arguments != first_arguments:
            raise UsageError(
                f"rank 0 called parallelize with (mode, gradients, batch) = {first_arguments}, rank {rank} with "
                f"{their_arguments}; all ranks must pass the same"
            )
        if theirs.parameters != first.parameters:
            ours = dict.fromkeys(first.parameters)
            other = next((p for p in theirs.parameters if p not in ours), "fewer parameters")
            raise UsageError(
                f"the model of rank {rank} differs from rank 0's: it has {other}; build the same on all ranks"
            )
    tried = [theirs for theirs, _ in everyone if theirs.samples]
    if not tried:
        raise UsageError("the sample batch is empty on every rank; pass one that holds samples")
    used = {name for theirs in tried for name in theirs.used}
    changing = frozenset(name for theirs in tried for name in theirs.changing)
    left = tuple(dict.fromkeys(place for theirs in tried for place in theirs.left))
    return replace(tried[0], used=tuple(sorted(used)), changing=changing, left=left)
