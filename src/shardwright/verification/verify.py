"""`verify`: one device and a plan side by side, on the user's own model, with real processes.

The measure: a deviation is max|a - b| over the entries of a tensor, divided by the largest entry of its kind (loss,
gradients, buffers, parameters) in the reference model. The tolerances are `TOLERANCES`. float32 parameters have their
own, since AdamW divides a gradient by its own size: where it is zero in exact arithmetic, the step is noise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwright.data.loading.batch import Batch
from shardwright.errors import ShardwrightError, UsageError
from shardwright.graph.ir import Node
from shardwright.graph.step import captured_step
from shardwright.graph.tracing.trace import LossFunction
from shardwright.lower.local import RandomKey, Site, localise
from shardwright.mesh.dtensor import gathered
from shardwright.mesh.mesh import Mesh
from shardwright.plan.make import make_plan
from shardwright.plan.plan import Plan
from shardwright.plan.request import Inputs, PlanRequest
from shardwright.plan.ruled import RuledGraph
from shardwright.plan.searches import Mode, SearchName
from shardwright.run.parallel import parallelize
from shardwright.run.programs.inputs import mesh_for
from shardwright.run.programs.planner import hardware_of
from shardwright.run.programs.splitting import local_part
from shardwright.run.programs.storage import agree_on_weights, refuse_meta
from shardwright.torch_private import tree_map
from shardwright.verification.build import as_batches
from shardwright.verification.result import Deviation, Verification
from shardwright.world.agreement import agree, from_all_ranks, from_rank_zero
from shardwright.world.ranks import ranks_by_collectives
from shardwright.world.world import World, current_world

TOLERANCES = {"float64": 1e-10, "float32": 1e-5}
# Of float32 parameters, in units of lr · steps, over entries whose gradient exceeded this part of the model's largest.
PARAMETER_TOLERANCE, GRADIENT_FLOOR = 1e-3, 1e-5
KINDS = ("loss", "gradients", "buffers", "parameters")
ONE_DEVICE, PLAIN = "one device", "plain PyTorch"
_CASTS: Mapping[str, Callable[[nn.Module], nn.Module]] = {"float64": nn.Module.double, "float32": nn.Module.float}


def verify(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Any,
    plan: Plan | str | None = None,
    *,
    steps: int = 3,
    mode: Mode = "auto",
    mesh: Mesh | str | None = None,
    search: SearchName | None = None,
    pins: Mapping[str, Any] | None = None,
    inputs: Inputs = "split",
    dtypes: Sequence[str] = ("float64", "float32"),
    lr: float = 1e-3,
) -> Verification:
    """Train on all ranks as a plan says, and beside it on one device; compare everything after each AdamW step.

    Every rank calls this with the same arguments; weights and batches are rank 0's. The references are the model
    through the same rules on one device and, where nothing in it is random, plain PyTorch. In a world of one rank it is
    plain PyTorch that matters. The user's model stays as it is: copies are trained, in training mode.

    A rank holds the model three times (whole for each reference), with gradients and optimizer states: a model that
    does not fit so must be verified at a smaller size.

    Args:
        batches: one global batch (a tensor, tuple or mapping), or a list of them, which are taken in turn.
        plan: a plan or the path of a saved one; by default it is made as `parallelize` would, from ``mode``, ``mesh``,
            ``search``, ``pins`` and ``inputs``. It is made for the model's own dtype and then used in all.
        dtypes: of "float64" and "float32"; parameters, buffers and batches are cast.

    Raises:
        UsageError: where an argument does not fit, or ranks disagree.
        CaptureError, StrategyError, PlanError: as `parallelize` does.
    """
    world = current_world()
    arguments = {"mode": mode, "mesh": str(mesh), "steps": steps, "lr": lr, "dtypes": tuple(dtypes)}
    agree("verify", {"the arguments": arguments}, _problem(steps, lr, dtypes))
    given = _global_batches(batches)
    refuse_meta(model)
    model = copy.deepcopy(model).to(world.device)
    if not model.training:
        model.train()
    agree_on_weights(model)
    chosen = mesh_for(mesh, world.size)

    def make() -> Plan:
        captured = captured_step(model, loss_fn, given[0], pins or {})
        graph = RuledGraph.of(captured)
        if isinstance(plan, str):
            return Plan.load(plan, graph)
        if plan is not None:
            return Plan.from_json(plan.to_json(), graph)
        return make_plan(captured, PlanRequest(chosen, mode, search, inputs, hardware_of(world)))

    used = from_rank_zero(ranks_by_collectives("making the plan"), make)
    random = random_operators(used)
    found: list[Deviation] = []
    with _exact_arithmetic():
        for dtype in dtypes:
            with ExitStack() as closing:
                side_by_side = _SideBySide(model, loss_fn, given, used, dtype, lr, world, closing, plain=not random)
                found += _worst_of_all_ranks(side_by_side.run(steps))
    return Verification(used, steps, lr, tuple(found), tuple(_notes(used, random, found)))


def _problem(steps: int, lr: float, dtypes: Sequence[str]) -> str | None:
    if steps < 1:
        return f"steps={steps} compares nothing; type a whole number from 1 on"
    if not lr > 0:
        return f"lr={lr} changes nothing; type a learning rate above 0"
    unknown = [dtype for dtype in dtypes if dtype not in TOLERANCES]
    if unknown or not dtypes:
        return f"dtypes={tuple(dtypes)!r} must name some of {', '.join(TOLERANCES)}"
    return None


def _global_batches(batches: Any) -> tuple[Any, ...]:
    """Rank 0's batches, on every rank: what is compared must have come from the same numbers."""

    def made() -> tuple[Any, ...]:
        found = as_batches(batches)
        for batch in found:
            if isinstance(batch, Batch) and (batch.start, batch.stop) != (0, batch.global_size):
                raise UsageError(f"verify needs global batches, got {batch!r}; pass the whole batch, not a rank's part")
        return tuple(tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, b) for b in found)

    return from_rank_zero(ranks_by_collectives("reading the batches"), made)


def random_operators(plan: Plan) -> tuple[Node, ...]:
    """The operators that draw random numbers in this graph; dropout with probability 0 draws none."""
    found = []
    for number, node in enumerate(plan.capture.nodes):
        rule, strategy = plan.graph.rules[node.name], plan.strategies[node.name]
        call = localise(Site(node, rule, strategy, plan.mesh, 0, plan.capture.values, number))
        if any(isinstance(arg, RandomKey) for arg in call.args):
            found.append(node)
    return tuple(found)


@contextmanager
def _exact_arithmetic() -> Iterator[None]:
    """Without TF32, whose 10 bits would hide every defect, and with the dtype of new tensors restored afterwards."""
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class _State:
    """What a step left, whole tensors by name; they hold until the next step."""

    loss: Tensors
    gradients: Tensors
    buffers: Tensors
    parameters: Tensors


class _Trainer:
    """AdamW steps on a model, and what they leave."""

    def __init__(self, step: Callable[[Any], Any], module: nn.Module, lr: float) -> None:
        self._step = step
        self._module = module
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=lr)

    def train(self, batch: Any) -> _State:
        result = self._step(batch)
        loss = result[0] if isinstance(result, (tuple, list)) else result
        self._optimizer.zero_grad()
        loss.backward()
        named = dict(self._module.named_parameters())
        # Without a gradient is with a gradient of zero, except to the optimizer, which shows in the parameters.
        gradients = {name: gathered(p.grad if p.grad is not None else torch.zeros_like(p)) for name, p in named.items()}
        self._optimizer.step()
        buffers = dict(self._module.named_buffers())
        return _State({"loss": loss.detach()}, gradients, buffers, {name: gathered(p) for name, p in named.items()})

    def take(self, parameters: Tensors, chosen: Tensors) -> None:
        """Take the chosen entries of these whole parameters in place of one's own."""
        with torch.no_grad():
            for name, parameter in self._module.named_parameters():
                if name in chosen:
                    theirs, where = _like(parameter, parameters[name]), _like(parameter, chosen[name])
                    local_part(parameter).copy_(theirs.where(where, local_part(parameter)))


def _like(parameter: Tensor, whole: Tensor) -> Tensor:
    """The part of a whole tensor that this rank holds of a parameter."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None).to_local()


class _SideBySide:
    """The plan and its references in one dtype, step by step."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], plan: Plan, dtype: str, lr: float,
        world: World, closing: ExitStack, *, plain: bool,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        torch_dtype: torch.dtype = getattr(torch, dtype)
        torch.set_default_dtype(torch_dtype)

        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf.to(world.device, torch_dtype if leaf.is_floating_point() else leaf.dtype)

        def copied() -> nn.Module:
            return _CASTS[dtype](copy.deepcopy(model))

        def parallel(mode: Mode, given: Plan | None) -> _Trainer:
            made = parallelize(copied(), loss_fn, self.batches[0], mode, plan=given, batch="global")
            return _Trainer(closing.enter_context(made), made.module, lr)

        self.batches = [tree_map(cast, batch) for batch in batches]
        try:
            self.split = parallel("auto", plan)
        except ShardwrightError as error:
            hint = f"in {dtype}: {error}\nTo leave {dtype} out, name the others: dtypes=('float32',)"
            raise type(error)(hint) from error
        self.references = {ONE_DEVICE: parallel("single", None)}
        if plain:
            module = copied()
            self.references[PLAIN] = _Trainer(lambda batch: loss_fn(module, batch), module, lr)
        self.comparisons = {name: _Comparison(dtype, name, lr, world.rank) for name in self.references}
        self.noise = _Noise(model)

    def run(self, steps: int) -> list[Deviation]:
        for step in range(1, steps + 1):
            batch = self.batches[(step - 1) % len(self.batches)]
            got = self.split.train(batch)
            expected = {name: reference.train(batch) for name, reference in self.references.items()}
            if self.dtype == "float32":
                self.noise.note(expected[ONE_DEVICE].gradients)
            for name, comparison in self.comparisons.items():
                comparison.add(step, got, expected[name], self.noise.where)
            for other in (self.split, self.references.get(PLAIN)):
                if other is not None:
                    other.take(expected[ONE_DEVICE].parameters, self.noise.where)
        worst = [worst for comparison in self.comparisons.values() for worst in comparison.worst.values()]
        return [deviation for deviation in worst if deviation.entries]


class _Noise:
    """The entries of float32 parameters whose AdamW step was noise once: their gradient is zero but for rounding.

    They are not compared, and all models take those of one device after each step: else a bias before a batch
    normalisation, say, would walk at random, and move the running mean with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self.where: dict[str, Tensor] = {}

    def note(self, gradients: Tensors) -> None:
        floor = GRADIENT_FLOOR * _largest(gradients)
        for name in self._trained:
            weak = gradients[name].abs() <= floor
            self.where[name] = self.where[name] | weak if name in self.where else weak


class _Comparison:
    """The largest deviations from one reference so far, by kind."""

    def __init__(self, dtype: str, reference: str, lr: float, rank: int) -> None:
        self.dtype, self.reference, self.lr, self.rank = dtype, reference, lr, rank
        self.worst: dict[str, Deviation] = {}

    def add(self, step: int, got: _State, expected: _State, noise: Tensors) -> None:
        for kind in KINDS:
            noisy = kind == "parameters" and self.dtype == "float32"
            tolerance = PARAMETER_TOLERANCE * self.lr * step if noisy else TOLERANCES[self.dtype]
            pair = getattr(got, kind), getattr(expected, kind)
            deviation = self._deviation(kind, step, tolerance, *pair, noise if noisy else {})
            before = self.worst.get(kind)
            if before is None or deviation.largest / tolerance >= before.largest / before.tolerance:
                self.worst[kind] = deviation

    def _deviation(
        self, kind: str, step: int, tolerance: float, got: Tensors, expected: Tensors, noise: Tensors
    ) -> Deviation:
        largest, scale = 0.0, _largest(expected)
        at: tuple[str, tuple[int, ...], float, float] = ("", (), 0.0, 0.0)
        for name, theirs in expected.items():
            difference = _difference(got[name], theirs)
            if name in noise:
                difference = difference.where(~noise[name], 0)
            if difference.numel() and float(difference.max()) > largest:
                largest = float(difference.max())
                index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
                at = (name, index, _number(got[name][index]), _number(theirs[index]))
        if kind == "loss" and not math.isfinite(float(expected["loss"])):
            largest, at = math.inf, ("loss", (), float(got["loss"]), float(expected["loss"]))
        name, index, ours, reference = at
        return Deviation(
            self.dtype, self.reference, kind, largest / scale if scale else math.inf * largest if largest else 0.0,
            tolerance, name, step, index, self.rank, ours, reference,
            entries=sum(t.numel() for t in expected.values()),
            skipped=sum(int(mask.sum()) for mask in noise.values()),
        )  # fmt: skip


def _number(entry: Tensor) -> float:
    return float(entry.abs() if entry.is_complex() else entry)


def _largest(tensors: Tensors) -> float:
    """The largest finite entry; masks of attention hold infinite ones."""
    finite = [t[t.isfinite()].abs() for t in tensors.values()]
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """|a - b| of every entry in double precision; 0 where both are the same, infinite ones and NaN included."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    return (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf).where(~same, 0.0)


def _worst_of_all_ranks(mine: list[Deviation]) -> list[Deviation]:
    """Of every kind and reference the largest deviation on any rank; all ranks have compared the same in one order."""
    return [max(ranks, key=lambda d: d.largest / d.tolerance) for ranks in zip(*from_all_ranks(mine), strict=True)]


def _notes(plan: Plan, random: Sequence[Node], found: Sequence[Deviation]) -> Iterator[str]:
    if plan.mesh.size > 1 and not plan.moved_bytes():
        yield "this plan splits nothing, since that is fastest: every rank computes everything"
    if random:
        first = random[0]
        yield (
            f"plain PyTorch is no reference here, since {len(random)} operators draw random numbers, the first of them "
            f"{first.op} at {first.source}"
        )
    for d in found:
        if d.skipped and d.reference == ONE_DEVICE:
            yield (
                f"{d.dtype}: {d.skipped} of {d.entries} entries of parameters are not compared: their gradient was in "
                f"some step below {GRADIENT_FLOOR:g} of the largest, where AdamW's step is noise"
            )
