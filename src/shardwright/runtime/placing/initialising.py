"""Values for the parameters and buffers of a model on the meta device, module by module as `Module.apply` goes.

The modules come children first, each with its own tensors alone: the values are those of one device on which
``model.to_empty(device=...)`` and ``model.apply(init)`` were called after the same seed, and no device ever holds the
whole model. Rank 0 alone calls ``init``; the others are sent what it has made.

A tensor that ``init`` leaves as it was would hold whatever the memory held, and one that it sets in another module than
the one that it was given would lose that value: both are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.common.signatures import changes_operands
from shardwright.common.torch_private import OperatorMode, version
from shardwright.distributed.agreement import from_rank_zero
from shardwright.distributed.ranks import Ranks, ranks_by_collectives
from shardwright.errors import UsageError
from shardwright.runtime.placing.members import Member, own_tensors

Init = Callable[[nn.Module], Any]
_SET_IN_PLACE = "set it in place, as torch.nn.init and copy_() do"


def init_problem(init: object) -> str | None:
    """Return why something cannot be the ``init`` of a model; None where it can."""
    if init is None or callable(init):
        return None
    return f"init={init!r} cannot be called; expected a function of a module, as Module.apply takes it"


@dataclass(frozen=True)
class _Visit:
    """A module that is to set some tensors; ``complete`` are those that no later one sets."""

    module: nn.Module
    sets: tuple[Member, ...]
    complete: tuple[Member, ...]


class Initialising:
    """Makes the values of ``empty``, which are those tensors of ``model`` that have none on rank 0."""

    def __init__(self, model: nn.Module, empty: Iterable[Member], init: Init | None, device: torch.device) -> None:
        self._empty = {id(member.tensor): member for member in empty}
        self._init, self._device = init, device
        self._paths = {module: path for path, module in model.named_modules()}
        self._visits = self._ordered(model)
        self._made: dict[str, tuple[Tensor, int]] = {}  # by name: what is being made, with its version at first
        self._ranks: Ranks = ranks_by_collectives("giving values to the model")

    def run(self, seed: int, shared: Callable[[Tensor], Tensor], store: Callable[[Member, Tensor], None]) -> None:
        """Make every member on rank 0, and store it on all ranks, one after the other; all ranks call it together.

        Torch's random numbers are afterwards as they were before.

        Args:
            seed: of the random numbers that values are drawn from.
            shared: gives a tensor of each rank the values of rank 0.
            store: is given each member with its values, whole.

        Raises:
            UsageError: on every rank, where ``init`` fails, leaves a tensor without values, or sets those of others.
        """
        if not self._visits:
            return
        from_rank_zero(self._ranks, self._refuse_without_reset)
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                torch.manual_seed(seed)
                for visit in self._visits:
                    from_rank_zero(self._ranks, lambda visit=visit: self._set(visit))  # type: ignore[misc]
                    for member in visit.complete:
                        store(member, shared(self._taken(member)))
        finally:
            for member in self._empty.values():  # as they were: `place` puts all in their places together
                member.put(member.tensor)

    def _ordered(self, model: nn.Module) -> list[_Visit]:
        """All modules with something to set, in the order of `Module.apply`."""
        visited = [(module, self._set_by(module)) for module in _applied(model)]
        last = {member.name: at for at, (_, sets) in enumerate(visited) for member in sets}
        return [
            _Visit(module, sets, tuple(member for member in sets if last[member.name] == at))
            for at, (module, sets) in enumerate(visited)
            if sets
        ]

    def _set_by(self, module: nn.Module) -> tuple[Member, ...]:
        """Return what a module sets: its own tensors, and its children's where torch's module sets those."""
        own = [*own_tensors(module).values()]
        if own and type(module).__module__.startswith("torch.nn."):
            own = [*module.parameters(), *module.buffers()]
        return tuple(self._empty[key] for key in dict.fromkeys(map(id, own)) if key in self._empty)

    def _refuse_without_reset(self) -> None:
        """Refuse modules that have no ``reset_parameters``, or lose by it what they hold, where it is to be called."""
        for module in (visit.module for visit in self._visits if self._init is None):
            own = own_tensors(module)
            given = [name for name, tensor in own.items() if id(tensor) not in self._empty]
            empty = ", ".join(name for name in own if name not in given)
            if given or _resetting(module) is None:
                why = f"has values for {given[0]}, which they would lose" if given else "has no reset_parameters()"
                raise UsageError(
                    f"{self._named(module)} holds {empty} on the meta device and {why}; pass sw.parallelize(..., "
                    "init=function), which is called as function(module) for each module and sets its tensors in place"
                )

    def _set(self, visit: _Visit) -> None:
        """Let a module set its tensors, which get memory now."""
        for member in visit.sets:
            if member.name not in self._made:
                made = _unset_like(member.tensor, self._device)
                self._made[member.name] = made, version(made)
                member.put(made)
        self._call(visit.module)
        for member in visit.sets:
            self._take_over(visit.module, member)
        for member in visit.complete:
            made, before = self._made[member.name]
            if not _is_set(made, version(made) != before):
                raise UsageError(f"{self._who(visit.module)} leaves {member.name} without values; {_SET_IN_PLACE}")

    def _call(self, module: nn.Module) -> None:
        def refusing_others(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if changes_operands(operator) and any(isinstance(x, Tensor) and x.is_meta for x in args):
                raise UsageError(
                    f"{self._who(module)} sets tensors of other modules, which are not there yet or no more; set in "
                    "each module its own tensors alone, as Module.apply calls for each"
                )
            return operator(*args, **kwargs)

        reset = _resetting(module)
        try:
            with torch.no_grad(), OperatorMode(refusing_others):
                if self._init is not None:
                    self._init(module)
                elif reset is not None:
                    reset()
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"{self._who(module)} failed: {type(error).__name__}: {error}") from error

    def _take_over(self, module: nn.Module, member: Member) -> None:
        """Take what was put in a member's place for its values, as `Module.to_empty` puts other buffers there."""
        made, _ = self._made[member.name]
        found = getattr(*member.holders[0])
        if found is made:
            return
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (made.shape, made.dtype) or found.is_meta:
            raise UsageError(f"{self._who(module)} puts something else in the place of {member.name}; {_SET_IN_PLACE}")
        taken = found.detach().to(self._device)
        taken = nn.Parameter(taken, made.requires_grad) if isinstance(made, nn.Parameter) else taken
        self._made[member.name] = taken, -1
        member.put(taken)

    def _taken(self, member: Member) -> Tensor:
        """Memory of this rank for a member, on rank 0 with its values, which the model holds no more."""
        member.put(member.tensor)
        if member.name in self._made:
            return self._made.pop(member.name)[0]
        return torch.empty_like(member.tensor, device=self._device)

    def _who(self, module: nn.Module) -> str:
        return f"{'init' if self._init else 'reset_parameters'} of {self._named(module)}"

    def _named(self, module: nn.Module) -> str:
        return f"{self._paths[module] or 'the model'} ({type(module).__name__})"


def _applied(model: nn.Module) -> Iterator[nn.Module]:
    """The modules in the order of `Module.apply`: one that several others hold comes several times."""
    for child in model.children():
        yield from _applied(child)
    yield model


def _resetting(module: nn.Module) -> Callable[[], Any] | None:
    """Return what sets the tensors of a module anew."""
    for name in ("reset_parameters", "_reset_parameters"):  # the second one of nn.MultiheadAttention
        reset = getattr(module, name, None)
        if callable(reset):
            found: Callable[[], Any] = reset
            return found
    return None


def _unset_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor with memory like one without, of numbers by which `_is_set` knows that nobody has set it."""
    made = torch.empty_like(tensor, device=device)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    elif made.dtype != torch.bool:
        made.fill_(torch.iinfo(made.dtype).max)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _is_set(made: Tensor, changed: bool) -> bool:
    """Return whether all of a tensor has values; ``changed`` says that it was written to, which ``x.data`` hides."""
    if made.is_floating_point() or made.is_complex():
        return not bool(made.isnan().any())
    if changed or not made.numel():
        return True
    return made.dtype != torch.bool and bool((made != torch.iinfo(made.dtype).max).any())
