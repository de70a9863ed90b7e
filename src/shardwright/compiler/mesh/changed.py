"""Changes of DTensors by hand, which mean the tensor that a DTensor stands for and not the part that this rank holds.

Torch loses some of them without a word: what is put in place of ``x.data`` never reaches the part, and what is written
by an index into a gathered copy is gone with that. Here each of them does to the whole what plain PyTorch does, of
which every rank then keeps its part. All ranks come to them together, with equal numbers and generators, of which the
latter are compared. What is written into a view of several ranks' parts, which is a copy, cannot be brought back, and
is refused when the model is next used. `split_tensor.SplitTensor` calls these; DTensors of others, as of a model by
FSDP2, are changed as torch changes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor, Partial

from shardwright.common import torch_private, trees
from shardwright.compiler.mesh.dtensor import gathered, is_on_mesh_of_model, layout_of, part_like
from shardwright.distributed.agreement import from_all_ranks
from shardwright.errors import UsageError


def set_data(tensor: DTensor, new: Tensor) -> bool:
    """Do what ``tensor.data = new`` says; return False where that is left to torch.

    Raises:
        UsageError: where ``new`` is of another shape, dtype or device.
    """
    if not is_on_mesh_of_model(tensor):
        return False
    if (new.shape, new.dtype, new.device) != (tensor.shape, tensor.dtype, tensor.device):
        raise UsageError(
            f"a split tensor of {_kind(tensor)} is given data of {_kind(new)}; what is split over the ranks of a model "
            "stays as it is, so that new numbers must be of the same shape, dtype and device"
        )
    _note_plain_in("data =", new)
    torch_private.put_part(tensor, part_like(new, tensor))
    return True


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def set_items(tensor: DTensor, index: Any, value: Any) -> None:
    """Do what ``tensor[index] = value`` says, without gradients.

    Raises:
        RuntimeError: in the words of torch for a parameter, where autograd would have to know of it.
    """
    if not is_on_mesh_of_model(tensor) or any(isinstance(placed, Partial) for placed in tensor.placements):
        Tensor.__setitem__(tensor, index, value)
        return
    taught = isinstance(value, Tensor) and value.requires_grad
    if torch.is_grad_enabled() and (tensor.requires_grad or taught):
        if tensor.is_leaf and tensor.requires_grad:
            raise RuntimeError(
                "a view of a leaf Variable that requires grad is being used in an in-place operation: write to a split "
                "parameter under torch.no_grad()"
            )
        raise RuntimeError(
            f"a split tensor of {_kind(tensor)} is written to by an index, with gradients that would not pass; make a "
            "new one, as by torch.where, or write under torch.no_grad()"
        )
    _note_plain_in("[...] =", (index, value))
    if _is_mask_of(tensor, index) and not isinstance(value, Tensor):
        tensor.masked_fill_(index, value)
        return
    with torch.no_grad():
        whole, part = gathered(tensor), tensor.to_local()
        whole[_wholes(index)] = _wholes(value)
        keep_part(part, whole, tensor)
    if isinstance(value, DTensor):
        _copies.brought_back(value, tensor)


def _is_mask_of(tensor: DTensor, index: Any) -> bool:
    """Return whether an index says of each entry of a tensor whether it is written to, and is laid out alike."""
    layout = tensor.shape, tensor.device_mesh, tensor.placements
    of_bool = isinstance(index, DTensor) and index.dtype == torch.bool
    return of_bool and (index.shape, index.device_mesh, index.placements) == layout


def keep_part(part: Tensor, whole: Tensor, of: DTensor) -> None:
    """Put into ``part``, what this rank holds of a tensor, the numbers of the ``whole``, which may be the same."""
    layout, mesh = layout_of(of)
    new = whole[layout.local_slice(of.shape, mesh, dist.get_rank())]
    if new.data_ptr() != part.data_ptr():
        part.copy_(new)


def _note_plain_in(words: str, given: Any) -> None:
    leaves = trees.tree_leaves(given)
    plain = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
    _copies.note_plain(words, plain)


def _wholes(given: Any) -> Any:
    return trees.tree_map(lambda leaf: gathered(leaf) if isinstance(leaf, DTensor) else leaf, given)


@dataclass(eq=False)
class _Copy:
    """A copy that was given in place of a view of a split tensor, with this rank's part as it was then.

    How often either was written to torch counts for both together, so that the numbers alone tell which it was. They
    are kept until nobody else looks into the memory, and let go then, where neither was written to.
    """

    of: ref[DTensor]
    whole: ref[UntypedStorage]  # in which the tensor lies
    version: int | None  # of the tensor; None where a write need not count
    words: str
    parts: tuple[Tensor, ...]
    before: tuple[Tensor, ...]
    given: tuple[ref[Tensor], ...] = ()

    @property
    def memory(self) -> int:
        """Return the key of the storage that a tensor that looks into it has, too."""
        return torch_private.storage_key(self.parts[0]) if self.parts else 0

    @property
    def is_done(self) -> bool:
        """Return whether nobody can write to it any more."""
        return not self.parts or torch_private.holders_of_memory(self.parts[0]) - 1 == len(self.parts)

    @property
    def is_lost(self) -> bool:
        """Return whether it was written to, in place of a tensor that is still there."""
        return self.whole() is not None and any(map(_differs, self.before, self.parts))

    def begin(self) -> None:
        """Let what it is now be what was given."""
        of = self.of()
        self.version = None if of is None or of.is_inference() else torch_private.version(of)
        self.before = tuple(part.clone() for part in self.parts)

    def forgotten(self, _: ref[Tensor]) -> None:
        """Called where one of those that were given is gone, which still looks into the memory just then."""
        of, own = self.of(), len(self.parts)
        if not own or torch_private.holders_of_memory(self.parts[0]) - 1 > own + 1:
            return
        if of is not None and self.version is not None and torch_private.version(of) == self.version:
            self.parts = self.before = ()


class _Copies:
    """The copies that this process was given in place of views of split tensors, and may still write to."""

    def __init__(self) -> None:
        self._noted: list[_Copy] = []
        self._lost: str | None = None
        self._are_asked_for = False  # the same on all ranks
        self._plain: list[tuple[str, str]] = []  # what was written of plain tensors, and by which operators

    def note(self, tensor: DTensor, view: str, found: Any) -> None:
        """Note what a view of a tensor gave that is none: what is written to it would be lost.

        Torch gives views of the parts, or gathers copies, as the layout says, which is the same on all ranks.
        """
        memory = torch_private.storage_key(torch_private.part_of(tensor))
        held = [_held(result) for result in trees.tree_leaves(found) if isinstance(result, Tensor)]
        if all(torch_private.storage_key(part) == memory for part in held) or not is_on_mesh_of_model(tensor):
            return
        if torch.is_grad_enabled() and tensor.requires_grad and tensor.is_leaf:  # torch refuses to write to a view
            return
        self._settle()
        self._are_asked_for = True
        held = [part for part in held if part.numel()]
        parts = tuple(part.detach() for part in held if torch_private.storage_key(part) != memory)
        if not parts:
            return
        words = f"{view}() or an index gave of a split tensor of shape {list(tensor.shape)}"
        copy = _Copy(ref(tensor), ref(torch_private.part_of(tensor).untyped_storage()), None, words, parts, ())
        copy.begin()
        forgotten = partial(_forgotten, ref(copy))
        copy.given = tuple(ref(part, forgotten) for part in held)
        self._noted.append(copy)

    def note_plain(self, words: str, given: Sequence[Tensor]) -> None:
        """Note that plain tensors are written into a split one, as what all ranks hold alike."""
        self._are_asked_for = self._are_asked_for or bool(given)
        for tensor in given:
            self._plain.append((f"{words} a tensor of {_kind(tensor)}", _digest(tensor)))

    def data_taken(self, tensor: DTensor) -> None:
        """Note that ``tensor.data`` was asked for: what is written to that, torch does not count."""
        for copy in self._of_memory(tensor):
            copy.version = None

    def brought_back(self, value: DTensor, tensor: DTensor) -> None:
        """Note that what was given of a tensor was written to it, as by ``x[i] += 1``."""
        whole = ref(torch_private.part_of(tensor).untyped_storage())
        for copy in self._of_memory(value):
            if copy.whole == whole:
                copy.begin()

    def refuse_lost(self) -> None:
        """As `refuse_lost_changes`."""
        if not self._are_asked_for:
            return
        self._settle()
        for copy in self._noted:
            self._look(copy)
        everyone = from_all_ranks((self._lost, bool(self._noted), self._plain))
        self._lost, self._plain = None, []
        self._are_asked_for = any(left for _, left, _ in everyone)
        _refuse_unlike([plain for _, _, plain in everyone])
        words = next((lost for lost, _, _ in everyone if lost), None)
        if words is not None:
            raise UsageError(
                f"what {words} was changed in place; it needs the parts of several ranks and is a copy, so that the "
                "change is lost; write by an index, under torch.no_grad(): parameter[index] = value"
            )

    def _settle(self) -> None:
        """Let go of all that nobody can write to any more, and keep in mind what was lost."""
        done = [copy for copy in self._noted if copy.is_done]
        for copy in done:
            self._look(copy)
            self._noted.remove(copy)

    def _look(self, copy: _Copy) -> None:
        if copy.is_lost:
            self._lost = self._lost or copy.words
            copy.begin()

    def _of_memory(self, tensor: DTensor) -> list[_Copy]:
        memory = torch_private.storage_key(torch_private.part_of(tensor)) if self._noted else 0
        return [copy for copy in self._noted if copy.memory == memory]


def _held(tensor: Tensor) -> Tensor:
    return torch_private.part_of(tensor) if isinstance(tensor, DTensor) else tensor


_copies = _Copies()


def _forgotten(copy: ref[_Copy], given: ref[Tensor]) -> None:
    found = copy()
    if found is not None:
        found.forgotten(given)


def note_copies(tensor: DTensor, operator: Any, found: Any) -> None:
    """Note what an operator gave of a tensor, of which it is to give views; all ranks call it together."""
    _copies.note(tensor, operator.overloadpacket.__name__, found)


def note_data_taken(tensor: DTensor) -> None:
    """Note that ``tensor.data`` was asked for, to which torch does not count what is written."""
    _copies.data_taken(tensor)


def note_plain(words: str, given: Sequence[Tensor]) -> None:
    """Note that ``words``, an operator, writes plain tensors into a split one: all ranks must have given the same."""
    _copies.note_plain(words, given)


def _digest(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous().reshape(-1).resolve_conj().resolve_neg().view(torch.uint8)
    return blake2b(numbers.numpy().data, digest_size=16).hexdigest()


def _refuse_unlike(everyone: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Refuse plain tensors that ranks have written into split ones and that are not alike."""
    for rank, theirs in enumerate(everyone):
        unlike = next((pair for pair in zip(everyone[0], theirs, strict=False) if pair[0] != pair[1]), None)
        if unlike is None and len(theirs) == len(everyone[0]):
            continue
        (words, _), (its_words, _) = unlike or (("nothing more", ""), ("nothing more", ""))
        raise UsageError(
            f"ranks have written different numbers into split parameters: rank 0 called {words}, rank {rank} "
            f"{'with other numbers' if words == its_words else f'called {its_words}'}; a plain tensor stands for what "
            "all ranks hold alike: make it from the same numbers on each, after sw.set_seed(seed), or of parameters"
        )


def refuse_lost_changes() -> None:
    """Refuse to use a sharded model where a change by the script was lost.

    This is called before steps and before its state is saved or loaded. All ranks call it together, and talk to each
    other where they have looked into sharded tensors since.

    Raises:
        UsageError: on all ranks, where on one of them a copy was written to in place of a parameter.
    """
    _copies.refuse_lost()


def _differs(before: Tensor, now: Tensor) -> bool:
    return bool(((before != now) & (before == before)).any())  # NaN differs from itself


def refuse_unlike_generators(tensor: DTensor, generator: torch.Generator | None) -> None:
    """Compare what the ranks draw from.

    Raises:
        UsageError: on all ranks, where two of them would draw other numbers.
    """
    if not is_on_mesh_of_model(tensor):
        return
    states = from_all_ranks(blake2b(_state(generator, tensor.device), digest_size=16).digest())
    unlike = next((rank for rank, state in enumerate(states) if state != states[0]), None)
    if unlike is not None:
        raise UsageError(
            f"random numbers for a split tensor of {_kind(tensor)} are drawn from generators that differ: rank "
            f"{unlike} would draw others than rank 0; call sw.set_seed(seed) on all ranks before, or pass generator= "
            "with the same seed"
        )


def _state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """Return the state of a generator, without one of that which ``device`` draws from."""
    if generator is None:
        own = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if own else torch.default_generator
    state: bytes = generator.get_state().numpy().tobytes()
    return state
