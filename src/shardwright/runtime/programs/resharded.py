"""Reshard after forward: tensors that are gathered where they are used, and not kept whole until the backward.

Above all they are sharded parameters, of which autograd would save the gathered one of every layer. What autograd is
about to save is compared with them: in their place it saves this rank's shard. The backward gathers the whole once more
before it comes to the last section of the program that needs it, and frees it when the first one has had it. Which
sections need it stands in the program, so that the backwards of all ranks gather in the same order, also where an
operator on an empty part keeps nothing. Coming to a section it may begin what the next one needs, so that this is
gathered beside what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage

from shardwright.common.torch_private import after_backward, backward_number, version
from shardwright.compiler.lower.recomputed import before_backward
from shardwright.compiler.mesh.collectives import Axes, Communicator, begin_all_gather
from shardwright.compiler.mesh.together import all_gather_together, begin_all_gather_together
from shardwright.errors import UsageError

Step = tuple[Callable[..., Tensor], dict[str, Any]]
Gather = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""A function that all-gathers whole tensors from this rank's shards."""
Begin = Callable[[Sequence[Tensor]], Callable[[], Sequence[Tensor]]]
"""A function that begins that, and returns what waits for it."""


class _Gathered:
    """A tensor that the backward gathers anew.

    ``sections`` of the program need it, and so many tensors that autograd has ``saved`` are views of it.
    """

    def __init__(self, collective: _Collective) -> None:
        self.collective = collective
        self.whole: Tensor | None = None
        self.sections = self.saved = 0
        self._entered = self._unpacked = 0  # sections that the backward has come to, and saved tensors that it has read

    def begin(self) -> None:
        """Count anew: a backward begins."""
        self._entered = self._unpacked = 0

    def enter_section(self) -> None:
        """Note that the backward comes to a section that needs the tensor."""
        self._entered += 1
        self._free()

    def unpack(self) -> Tensor:
        """Return the whole tensor, for a saved view of it."""
        if self.whole is None:  # it was freed before: somebody looks at what autograd has saved
            self.collective.run()
        whole = self.whole
        assert whole is not None
        self._unpacked += 1
        self._free()
        return whole

    def _free(self) -> None:
        if self._entered >= self.sections and self._unpacked >= self.saved:
            self.whole = None


class _Collective:
    """The all-gather of tensors from this rank's shards, once in each backward."""

    def __init__(self, names: Sequence[str], parts: Sequence[Tensor], gather: Gather, begin: Begin | None) -> None:
        self._names, self._parts = names, [part.detach() for part in parts]
        self._gather, self._begin = gather, begin
        self._begun: tuple[int, Callable[[], Sequence[Tensor]]] | None = None  # in which backward, and its wait
        self._versions = [version(part) for part in parts]
        self._backward: int | None = None
        self._members: list[ref[_Gathered]] = []

    def members(self) -> list[_Gathered]:
        """Return what stands for each of the gathered tensors."""
        made = [_Gathered(self) for _ in self._parts]
        self._members = [ref(member) for member in made]
        return made

    def begin(self) -> None:
        """Begin to gather, where this backward has not done so; it may then not come to what needs it."""
        backward = backward_number()
        begun_in = None if self._begun is None else self._begun[0]
        if self._begin is None or backward in (self._backward, begun_in):
            return
        self._refuse_changed()
        with torch.no_grad():
            self._begun = backward, self._begin(self._parts)
        after_backward(self._drop)

    def _drop(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            begun[1]()

    def ready(self) -> None:
        """Gather, where this backward has not done so."""
        if (backward := backward_number()) == self._backward:
            return
        self._backward = backward
        for found in self._members:
            if (member := found()) is not None:
                member.begin()
        self.run()

    def run(self) -> None:
        """Give what is gathered to those that are needed."""
        self._refuse_changed()
        begun, self._begun = self._begun, None
        with torch.no_grad():
            is_there = begun is not None and begun[0] == backward_number()
            wholes = begun[1]() if begun is not None and is_there else self._gather(self._parts)
        for found, whole in zip(self._members, wholes, strict=True):
            member = found()
            if member is not None and member.saved:
                member.whole = whole

    def _refuse_changed(self) -> None:
        for name, part, before in zip(self._names, self._parts, self._versions, strict=True):
            if version(part) != before:
                raise UsageError(
                    f"{name}, which the backward gathers again, was changed in place since the forward; call "
                    "backward() before optimizer.step()"
                )


@dataclass(frozen=True)
class _SavedView:
    """What autograd saves in place of a view of a gathered tensor."""

    gathered: _Gathered
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        return self.gathered.unpack().as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True)
class _SavedTensor:
    """Any other tensor that autograd saves. With hooks torch does not check by itself that it stays unchanged."""

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        if version(self.saved) != self.version:
            raise UsageError(
                f"a tensor of shape {list(self.saved.shape)} that the backward needs was changed in place since the "
                "forward; call backward() before optimizer.step()"
            )
        return self.saved


class ReshardAfterForward:
    """Local programs call this as ``resharded(all_gather(w, ...), w, "w", comm, [(all_gather, {...})])``.

    Or, for what one collective gathers, as ``resharded.together(all_gather_together(...), ("w", "v"), comm, ("dp",),
    (w, {...}), (v, {...}))``. What is gathered is numbered in the order of these calls. A section of the program that
    needs some in its backward begins with ``resharded.expect([0, 2])`` and ends with
    ``[y] = resharded.before([0, 2], [y])``.
    """

    def __init__(self) -> None:
        # Cached by the memory, which no other tensor takes as long as it stands here, for one run of a program.
        self._known: dict[ref[UntypedStorage], _Gathered] = {}
        self._numbered: list[_Gathered] = []  # in the order of the program
        self._expected: list[_Gathered] = []  # what the present section needs

    def __call__(self, whole: Tensor, part: Tensor, name: str, comm: Communicator, steps: Sequence[Step]) -> Tensor:
        def gather(parts: Sequence[Tensor]) -> Sequence[Tensor]:
            [gathered] = parts
            for function, arguments in steps:
                gathered = function(gathered, comm, **arguments)
            return [gathered]

        def begin(parts: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
            [part], (_, arguments) = parts, moving[0]
            wait = begin_all_gather(
                part,
                comm,
                **{name: given for name, given in arguments.items() if name not in ("adjoint", "reduced_in")},
            )
            return lambda: [wait()]

        moving = [step for step in steps if "dim" in step[1]]  # and not "enter", forward the identity
        gathers_alone = len(moving) == 1 and "adjoint" in moving[0][1]  # as all_gather alone has it
        self._note([whole], _Collective([name], [part], gather, begin if gathers_alone else None))
        return whole

    def together(
        self,
        wholes: Sequence[Tensor],
        names: Sequence[str],
        comm: Communicator,
        axes: Axes,
        *parts: tuple[Tensor, dict[str, Any]],
    ) -> Sequence[Tensor]:
        """``wholes``, which were gathered of ``parts``, each with the other arguments of its own."""
        hows = [how for _, how in parts]

        def gather(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return all_gather_together(comm, axes, "slice", *zip(tensors, hows, strict=True))

        def begin(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
            return begin_all_gather_together(comm, axes, *zip(tensors, hows, strict=True))

        self._note(wholes, _Collective(names, [part for part, _ in parts], gather, begin))
        return wholes

    def expect(self, numbers: Sequence[int]) -> None:
        """Save shards of these alone, until the section ends: of others nobody would gather the whole again."""
        if torch.is_grad_enabled():
            self._expected = [self._numbered[number] for number in numbers]

    def before(self, numbers: Sequence[int], outputs: Sequence[Tensor], ahead: Sequence[int] = ()) -> Sequence[Tensor]:
        """Return what a section makes for others, such that a backward first gathers what the section needs.

        It then begins what is ``ahead``, which the section before this one needs.
        """
        if not torch.is_grad_enabled():
            return outputs
        needed, self._expected = [self._numbered[number] for number in numbers], []
        for gathered in needed:
            gathered.sections += 1
        following = [self._numbered[number].collective for number in ahead]
        return before_backward(partial(_gather, needed, following), outputs)

    def _note(self, wholes: Sequence[Tensor], collective: _Collective) -> None:
        if torch.is_grad_enabled():
            members = collective.members()
            self._known.update((ref(whole.untyped_storage()), one) for whole, one in zip(wholes, members, strict=True))
            self._numbered += members

    @contextmanager
    def saving_shards(self) -> Iterator[None]:
        """Inside, autograd saves the shards of what the backward gathers anew."""
        self._forget()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            self._forget()  # so that a shard lives no longer than what needs it

    def _forget(self) -> None:
        self._known, self._numbered, self._expected = {}, [], []

    def _pack(self, saved: Tensor) -> _SavedView | _SavedTensor:
        found = self._known.get(ref(saved.untyped_storage()))
        if found is None or found not in self._expected:
            # Detached: a result that its own backward saved with its history would never be freed.
            return _SavedTensor(saved.detach(), version(saved))
        found.saved += 1
        return _SavedView(found, tuple(saved.size()), tuple(saved.stride()), int(saved.storage_offset()))


def _gather(needed: Sequence[_Gathered], ahead: Sequence[_Collective]) -> None:
    """Gather what a section needs to which the backward comes, and begin what is ahead."""
    for gathered in needed:
        gathered.collective.ready()
        gathered.enter_section()
    for collective in ahead:
        collective.begin()


def _unpack(packed: _SavedView | _SavedTensor) -> Tensor:
    return packed.tensor()
