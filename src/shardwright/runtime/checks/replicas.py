"""Compares the replicas of a model on several ranks: parameters, shards of them, and buffers.

All begin with what rank 0 has, and each makes the steps of its optimizer for itself, from gradients that are the same:
so they stay alike, unless a script does on one rank what it does not do on the others. That no collective of a step
would show, and the loss would be that of no model. What only one rank holds is compared with nothing: of that ranks
tell each other which steps they have made.

Ranks compare checksums, in a collective of 8 bytes for each way in which tensors are cut. Ranks on unlike processors
may round unlike, so where checksums differ they tell of each tensor a few projections: the difference of these is, on
average, the length of the difference of the tensors. What all decide by has come from all, so that they decide alike.

Refused is what differs by more than the square root of what a rounding makes, for float32 by 3e-4 of its norm, which a
million roundings at random are below; in the first calls by as many hundredths of that, which is what a single step
exceeds. A gradient that ranks computed each for itself may be nothing but a rounding, as that of the bias of keys in
attention, which Adam makes as large as any other. Such parameters are refused where most of their kind differ.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.common import torch_private
from shardwright.compiler.capture.ir import Capture
from shardwright.compiler.capture.reduced import is_cast_or_view
from shardwright.compiler.lower.program import LocalProgram
from shardwright.compiler.mesh.dtensor import layout_of
from shardwright.compiler.mesh.processes import all_gather_single
from shardwright.distributed.agreement import from_all_ranks
from shardwright.distributed.control import control_group
from shardwright.distributed.lockstep import EVERY, Lockstep, Turns
from shardwright.distributed.pending_numbers import PendingNumbers
from shardwright.distributed.ranks import alone
from shardwright.errors import UsageError
from shardwright.runtime.checks.changed_buffers import Place, places_of
from shardwright.runtime.checks.digests import PIECE, mixed, sum_of_words
from shardwright.runtime.programs.splitting import is_split
from shardwright.runtime.updates.optimizer_steps import made_steps, unlike

_PROJECTIONS = 8
_WIDTH = 2**12  # of the rows that are projected together
_NAMED = 8  # ranks that a message names

Summed = Mapping[str, Collection[str]]
"""The axes over which the gradient of a parameter is summed, by its name; along others each rank has it for itself."""


@dataclass(frozen=True, eq=False)
class _Held:
    """The tensors that several ranks hold: ``first`` is, for each rank, the first one of those that hold the same.

    ``along`` names the axes along which a parameter is the same.
    """

    name: str
    first: tuple[int, ...]
    at: nn.Parameter | Place
    along: frozenset[str] = frozenset()

    @property
    def now(self) -> Tensor | None:
        """Return what this rank holds of it."""
        found: Tensor | None = self.at.now if isinstance(self.at, Place) else self.at
        return torch_private.part_of(found) if isinstance(found, DTensor) else found

    @property
    def is_buffer(self) -> bool:
        return isinstance(self.at, Place)


class Replicas:
    """Compares the replicas of a model in its first calls, and then in one of so many.

    Costs nothing in most calls; in those of `Turns` a pass over all parameters, and a collective of 8 bytes for each
    way in which tensors are cut.

    Args:
        buffers: the names of those that are to be the same on all ranks.
        axes: those along which parameters are the same that are no DTensors.
        summed: asked where ranks have drifted apart, for the parameters of which gradients are computed.
        together: whether ranks make the calls of the model together; else nothing is compared.
        failed: told of an error in what ranks compare together, where others may wait for this one.
    """

    def __init__(
        self,
        model: nn.Module,
        buffers: Collection[str],
        lockstep: Lockstep,
        device: torch.device,
        turns: Turns,
        *,
        axes: Collection[str] = (),
        summed: Callable[[], Summed] = dict,
        together: bool = True,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._model, self._buffers, self._axes = model, frozenset(buffers), frozenset(axes)
        self._lockstep, self._device, self._summed = lockstep, device, summed
        self._compares = together and not alone()
        self._turns = turns
        # The method of who has this: a model that nobody holds is to be gone at once, with its process groups.
        self._failed = WeakMethod(failed) if failed is not None else None
        self._made_before = made_steps()
        self._later = device.type != "cpu"  # whether numbers are read one call after they were asked for
        self._begun: PendingNumbers | None = None
        self.due = False
        """True where `before` compares in any case."""

    def before(self) -> None:
        """Compare, where that is due; all ranks call it together. What was refused in the last call is looked at again.

        A GPU is not waited for: what it is asked for in one call, but for the first ones, is compared in the next.

        Raises:
            UsageError: on every rank, where what they hold has drifted apart; the next step may begin then.
        """
        if self._compares and self._turns.due:
            if self._later and self._turns.steady and self._sets and not self.due:
                self._begun = self._digests()
                return
            self.due = True
        if not self.due and self._begun is None:
            return
        try:
            refusal = self.check()
        except Exception as error:
            if self._failed is not None and (failed := self._failed()) is not None:
                failed(error)
            raise
        if refusal:
            raise UsageError(refusal)

    def check(self) -> str | None:
        """Compare; all ranks call it together.

        Returns:
            on every rank what to say where some hold other numbers than others, which the next call looks at again.
        """
        begun, self._begun = self._begun, None
        self.due = True
        if self._sets or self._has_split:
            with torch.no_grad():
                everyone = self._gathered(begun or self._digests())
                if refusal := self._other_steps([theirs[len(self._sets) :] for theirs in everyone]):
                    return refusal
                others = [
                    each
                    for at, (first, held) in enumerate(self._sets.items())
                    if any(everyone[rank][at] != everyone[of][at] for rank, of in enumerate(first))
                    for each in held
                ]
                refusal = self._measure(others) if others else None
                if refusal:
                    return refusal
        self.due = False
        return None

    @cached_property
    def _has_split(self) -> bool:
        """Return whether parameters are split.

        Cached: `Structure` refuses parameters that were replaced after sw.parallelize.
        """
        return is_split(self._model)

    @cached_property
    def _sets(self) -> dict[tuple[int, ...], list[_Held]]:
        """Return what is compared, by the ranks that hold the same: equal on all ranks, and in the same order.

        Cached: of buffers it has the places, and `Structure` refuses parameters that were replaced.
        """
        found: dict[tuple[int, ...], list[_Held]] = {}
        for each in _held(self._model, self._buffers, self._axes):
            found.setdefault(each.first, []).append(each)
        return found

    def _digests(self) -> PendingNumbers:
        """Return a number for each way in which tensors are cut, of all that is cut so."""
        with torch.no_grad():
            digests = [_digest(held, self._device) for held in self._sets.values()]
            return PendingNumbers(torch.stack(digests) if digests else torch.empty(0, device="cpu"))

    def _gathered(self, digests: PendingNumbers) -> list[list[int]]:
        """Those of all ranks, rank by rank, and what optimizers have done to split parameters."""
        mine = torch.tensor([*digests.values(), *made_steps().since(self._made_before)], device="cpu")
        everyone = mine.new_empty(dist.get_world_size() * len(mine))
        self._lockstep.run(all_gather_single, everyone, mine, group=control_group())
        found: list[list[int]] = everyone.view(-1, len(mine)).tolist()
        return found

    def _other_steps(self, everyone: Sequence[Sequence[int]]) -> str | None:
        if all(theirs == everyone[0] for theirs in everyone):
            return None
        return unlike(everyone, from_all_ranks(made_steps().last))

    def _measure(self, held: Sequence[_Held]) -> str | None:
        """Return what is to be refused of what differs by more than roundings."""
        sums = from_all_ranks(torch.stack([sum_of_words(each.now, self._device) for each in held]).tolist())
        unlike = {
            each: ranks
            for at, each in enumerate(held)
            if (ranks := [rank for rank, of in enumerate(each.first) if sums[rank][at] != sums[of][at]])
        }
        sketches = from_all_ranks([_sketch(each.now) for each in unlike])
        drifted: dict[_Held, dict[int, str]] = {}
        allowed = min(1, self._turns.seen / EVERY)
        for at, (each, ranks) in enumerate(unlike.items()):
            words = {r: _difference(sketches[r][at], sketches[each.first[r]][at], allowed) for r in ranks}
            if beyond := {rank: text for rank, text in words.items() if text}:
                drifted[each] = beyond
        refused = self._refused(list(drifted))
        return _refusal(refused, drifted[refused[0]]) if refused else None

    def _refused(self, drifted: Sequence[_Held]) -> list[_Held]:
        """Those of which no rounding can be the reason, or which are most of their kind."""
        every, summed = [each for held in self._sets.values() for each in held], self._summed()

        def is_certain(held: _Held) -> bool:
            return held.along <= frozenset(summed.get(held.name, held.along))

        def kind(held: _Held) -> str:
            return "buffer" if held.is_buffer else "parameter" if held.name in summed else "frozen parameter"

        all_certain = all(is_certain(held) for held in every)
        all_of, drifted_of = Counter(map(kind, every)), Counter(map(kind, drifted))
        return [
            held
            for held in drifted
            if all_certain
            or (not held.is_buffer and is_certain(held))
            or 2 * drifted_of[kind(held)] >= all_of[kind(held)]
        ]


def summed_axes(capture: Capture, program: LocalProgram) -> dict[str, set[str]]:
    """The axes over which the backward of a program sums the gradient of each parameter that has one, by names.

    The sum may come where only casts and views follow the parameter, as under autocast: all ranks make the same of it.
    """
    reduced: dict[str, set[str]] = {name: set() for name in capture.values}
    for value, step in (moved for instruction in program.instructions for moved in instruction.moves):
        _, backward = value.collectives(step, program.mesh)
        if backward and value.needs_gradient and backward.kind in ("all_reduce", "reduce_scatter"):
            reduced[value.name].update(backward.axes)
    after: dict[str, list[set[str]]] = {name: [] for name in capture.values}  # by each node that takes the value
    for node in reversed(capture.nodes):
        if is_cast_or_view(node):
            (operand,), results = node.operands, [_with_those_after(name, reduced, after) for name in node.results]
            after[operand].append(set.intersection(*results))
        else:
            for operand in node.operands:
                after[operand].append(set())
    return {
        value.label: _with_those_after(value.name, reduced, after)
        for value in capture.of_kind("parameter")
        if value.needs_gradient
    }


def _with_those_after(name: str, reduced: Mapping[str, set[str]], after: Mapping[str, list[set[str]]]) -> set[str]:
    """The axes over which the gradient of a value is summed: its own, and those of all that is made of it."""
    return reduced[name] | (set.intersection(*after[name]) if after[name] else set())


def _held(model: nn.Module, buffers: Collection[str], axes: frozenset[str]) -> Iterator[_Held]:
    """Return what is the same on several ranks, in the same order on all of these."""
    everywhere = (0,) * dist.get_world_size()
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor):
            yield _Held(name, everywhere, parameter, axes)
            continue
        layout, mesh = layout_of(parameter)
        along = frozenset(axis.name for axis in mesh.axes if axis.size > 1) - layout.split_axes
        if along:
            first = {rank: group[0] for group in mesh.groups(along) for rank in group}
            yield _Held(name, tuple(first[rank] for rank in range(mesh.size)), parameter, along)
    for place in places_of(model):
        if place.name in buffers:
            yield _Held(place.name, everywhere, place)


def _digest(held: Sequence[_Held], device: torch.device) -> Tensor:
    """A whole number that other values would nearly never give, a scalar of int64 on ``device``."""
    sums = torch.stack([sum_of_words(each.now, device) for each in held])
    return mixed(sums + torch.arange(len(held), device=device)).sum()


class _Sketch(NamedTuple):
    """The figures of a tensor on one rank; NaN and infinite entries are counted, and are 0 in all else."""

    what: str
    rounds: float  # how much a rounding may change a number by, relative to it; 0 for whole numbers
    not_finite: int
    norm: float
    projections: tuple[float, ...]


def _sketch(tensor: Tensor | None) -> _Sketch:
    if tensor is None or tensor.layout != torch.strided:
        return _Sketch("no such tensor", 0, 0, 0, ())
    what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    plain = tensor.detach().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
    signs = _signs(0, _WIDTH, flat.device)
    total = torch.zeros(_PROJECTIONS + 2, dtype=torch.float64, device=flat.device)
    for number, piece in enumerate(torch.split(flat, PIECE)):
        numbers = piece.double()
        finite = numbers.isfinite()
        numbers = numbers.where(finite, 0)
        rows = nn.functional.pad(numbers, (0, -len(numbers) % _WIDTH)).view(-1, _WIDTH)
        total[:-2] += (rows @ signs * _signs(_WIDTH + number * (PIECE // _WIDTH), len(rows), flat.device)).sum(0)
        total[-2] += numbers.square().sum()
        total[-1] += len(numbers) - finite.sum()
    *projections, squares, not_finite = total.tolist()
    rounds = torch.finfo(plain.dtype).eps if plain.is_floating_point() or plain.is_complex() else 0.0
    return _Sketch(what, rounds, int(not_finite), math.sqrt(squares), tuple(projections))


def _signs(start: int, count: int, device: torch.device) -> Tensor:
    """1 and -1 without an order, float64 [count, projections], the same on all ranks."""
    numbers = torch.arange(start * _PROJECTIONS, (start + count) * _PROJECTIONS, device=device)
    return (mixed(numbers) >> 40 & 1).mul_(2).sub_(1).double().view(count, _PROJECTIONS)


def _difference(there: _Sketch, here: _Sketch, allowed: float) -> str:
    """Return how a tensor differs from another one whose bits are not the same; empty where that may be roundings.

    Args:
        allowed: how much of what many roundings may make those so far may have made.
    """
    if there.what != here.what:
        return f"being {there.what} in place of {here.what}"
    if there.not_finite != here.not_finite:
        return f"with {there.not_finite} numbers that are NaN or infinite in place of {here.not_finite}"
    squares = [(a - b) ** 2 for a, b in zip(there.projections, here.projections, strict=True)]
    length, norm = math.sqrt(sum(squares) / max(len(squares), 1)), max(there.norm, here.norm)
    if length <= allowed * math.sqrt(here.rounds) * norm:
        return ""
    return f"by about {length / (norm or 1):.2g} of its norm"


_ADVICE = {
    False: "every rank must change parameters alike: with the same lr, an optimizer.step() on each, gradients as "
    "backward() leaves them, the same checkpoint, and noise drawn after sw.set_seed(seed)",
    True: "every rank must change buffers alike, as torch.optim.swa_utils.update_bn does where it is given the same "
    "whole batches on each, and load the same checkpoint",
}


def _refusal(refused: Sequence[_Held], of: Mapping[int, str]) -> str:
    """Return what is said of the first of those that have drifted; ``of`` says by how much it has on each rank."""
    held = refused[0]
    rank = min(of)
    same = [other for other in of if held.first[other] == held.first[rank]]
    names = f"rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same[:_NAMED]))}"
    names += f" and {len(same) - _NAMED} more" if len(same) > _NAMED else ""
    more = f", as {len(refused) - 1} more of its tensors do" if len(refused) > 1 else ""
    return (
        f"what ranks hold alike of the model has drifted apart: {held.name} of {names} differs from that of rank "
        f"{held.first[rank]}, {of[rank]}{more}; {_ADVICE[held.is_buffer]}"
    )
