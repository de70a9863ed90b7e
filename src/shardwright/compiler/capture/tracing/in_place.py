"""Changes that a graph, which has values alone, would lose: of gradients, which are refused, and of buffers.

Where gradients are off, or by way of ``x.detach()`` and ``x.data``, a tensor gets new values and keeps its gradient.
A buffer that is set, and not written into, is written into at the end of the step, which the exporter knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.functional.hidden_aliases import meet, span
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.errors import CaptureError


class Buffers:
    """The buffers of a model whose step begins."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._before = dict(model.named_buffers(remove_duplicate=False))

    def written(
        self,
        results: Sequence[torch.Tensor],
        batch: Sequence[torch.Tensor],
        lines: Mapping[str, str],
        is_moved: Callable[[Any, Any], bool],
        *,
        keeps_new: bool,
    ) -> list[torch.Tensor]:
        """Write into the buffers what the step has set in their places; its ``results``, which do not see that.

        Args:
            lines: where buffers were set, by their names.
            is_moved: tells whether a tensor is another one in a dtype that holds all its numbers: it is none to write.
            keeps_new: keep buffers that the step has registered, which a graph does not have.

        Raises:
            CaptureError: where what was set is no such tensor, or is one that has another name, too.
        """
        now = dict(self._model.named_buffers(remove_duplicate=False))
        for name in () if keeps_new else now.keys() - self._before.keys():
            self._put(name, None)
        for name, buffer in self._before.items():
            if now.get(name) is not buffer and is_moved(buffer, now.get(name)):
                now[name] = buffer
                self._put(name, buffer)
        assigned: dict[str, Any] = {n: now.get(n) for n, buffer in self._before.items() if now.get(n) is not buffer}
        if not assigned:
            return list(results)
        given = {f"tensor {i} of the batch": tensor for i, tensor in enumerate(batch)}
        named = {**dict(self._model.named_parameters()), **given, **now}
        for name, new in assigned.items():
            self._refuse(name, new, lines.get(name, ""))
            same = [other for other, tensor in named.items() if other != name and _storage(tensor) == _storage(new)]
            left = [other for other, tensor in now.items() if tensor is self._before[name] and other not in assigned]
            if same or left:
                raise CaptureError(
                    f"the buffer {name} is set to a tensor{lines.get(name, '')}, and {(same or left)[0]} is the same\n"
                    "Write .clone() behind it: a graph would not know that a change of one changes the other."
                )
        old = {_storage(self._before[name]) for name in assigned}
        kept = [result.clone() if _storage(result) in old else result for result in results]
        values = {name: new.detach().clone() for name, new in assigned.items()}
        for name, value in values.items():
            self._put(name, self._before[name].copy_(value))
        return kept

    def _put(self, name: str, buffer: torch.Tensor | None) -> None:
        owner, _, leaf = name.rpartition(".")
        torch_private.buffers_in(self._model.get_submodule(owner))[leaf] = buffer

    def _refuse(self, name: str, new: torch.Tensor | None, line: str) -> None:
        old = self._before[name]
        if new is None or (new.shape, new.dtype) != (old.shape, old.dtype):
            raise CaptureError(
                f"the buffer {name} is {_described(old)} and is set to {_described(new)}{line}\n"
                "Keep its shape and dtype, for which the graph is made."
            )


_BESIDE = (
    "It does not belong to the model, so that it would not be saved, and ranks would not have the same one. Make it a "
    "buffer of the model, or what has it a submodule of the model; call eval() of a module that only keeps statistics."
)


def _made_a_buffer(place: Place) -> str:
    name = "" if place.path else f"({place.name!r}, ...)"
    return (
        "It is no buffer, so that it would not be saved, and ranks would not have the same one. Make it a buffer of "
        f"the model, by self.register_buffer{name} in __init__."
    )


def _described(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


class InPlace:
    """Watches one capture."""

    def __init__(self, place_of: Callable[[torch.Tensor], Place | None]) -> None:
        self._place_of = place_of
        # Of tensors with a gradient that others without one look into; held, so that no other takes its place.
        self._storages: dict[int, Any] = {}

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int]]:
        """The tensors that a function may change, and how often they were changed so far."""
        found = [arg for arg in (*args[:1], kwargs.get("out")) if isinstance(arg, torch.Tensor)]
        return [(tensor, torch_private.version(tensor)) for tensor in found if _counts(tensor)]

    def after(self, before: Sequence[tuple[torch.Tensor, int]], result: Any, where: str) -> None:
        """Refuse what a function did, and note what it returns.

        Raises:
            CaptureError: where it changed a tensor that goes on to have a gradient that does not know of it, or one
                that stands beside parameters, buffers and the batch.
        """
        for tensor, version in before:
            changed = torch_private.version(tensor) != version
            if changed:
                self._refuse_beside(tensor, where)
            if changed and self._loses_gradient(tensor):
                raise CaptureError(
                    f"a tensor that has a gradient is changed in place behind the back of autograd, at {where}\n"
                    "Make a new one, which has the new values and the old gradient: x = x + (new - x).detach()."
                )
            if _has_gradient(tensor) and _looks_into(result, tensor):
                self._storages[_storage(tensor)] = tensor.untyped_storage()

    def _refuse_beside(self, tensor: torch.Tensor, where: str) -> None:
        """Refuse to change what was there before the step, or a view of it, and is no buffer."""
        base = torch_private.base_of(tensor)
        place = None if torch_private.is_fake(base) else self._place_of(base)
        if place is not None:
            advice = _made_a_buffer(place) if place.kind == "attribute" else _BESIDE
            raise CaptureError(f"{place}{',' * (place.kind != 'attribute')} is changed in place, at {where}\n{advice}")

    def _loses_gradient(self, changed: torch.Tensor) -> bool:
        tensor = torch_private.base_of(changed)  # a view that was made and changed without gradients tells of none
        if tensor.requires_grad:
            return not tensor.is_leaf and not torch.is_grad_enabled()
        return _storage(tensor) in self._storages


def _counts(tensor: torch.Tensor) -> bool:
    """Return whether a tensor knows how often it was changed."""
    return torch_private.is_fake(tensor) or not tensor.is_inference()


def _has_gradient(tensor: torch.Tensor) -> bool:
    """Parameters may not be changed at all, which is refused elsewhere."""
    return tensor.requires_grad and not tensor.is_leaf


def _looks_into(result: Any, tensor: torch.Tensor) -> bool:
    """Return whether a result has no gradient and lies in the memory of ``tensor``."""
    if not isinstance(result, torch.Tensor) or result.requires_grad or not torch_private.is_fake(result):
        return False
    return _storage(result) == _storage(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return torch_private.storage_key(tensor)


def refuse_shared_memory(tensors: Mapping[str, torch.Tensor], changed: Iterable[str]) -> None:
    """Refuse tensors that look into the memory of others, which change.

    Args:
        tensors: of the model and beside it, by what users call them.
        changed: those that the step or the optimizer changes.
    """
    by_storage: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel():
            by_storage.setdefault(_storage(tensor), []).append(name)
    for name in changed:
        for other in by_storage.get(_storage(tensors[name]), ()) if name in tensors else ():
            if tensors[other] is not tensors[name] and _overlap(tensors[name], tensors[other]):
                raise CaptureError(
                    f"{name} of the model changes, and {other} looks into the same memory, which ranks do not have: "
                    "one would change without the other\nTie modules by one parameter, as in b.weight = a.weight "
                    "without .data; give other tensors memory of their own by .clone()."
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether an element of one tensor lies where an element of the other does, in the same storage."""
    here, there = span(one), span(other)
    if not meet(here, there) or one.dtype != other.dtype:
        return meet(here, there)
    taken = torch.zeros(max(here[1], there[1]) // one.itemsize, dtype=torch.bool)
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def refuse_setting_data(function: Any, where: str) -> None:
    """Refuse ``x.data = y``, which an exported program does not have."""
    if function == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        raise CaptureError(
            f"x.data of a tensor is set while the model is captured, at {where}: the graph would forget it\n"
            "Write into a buffer by buffer.copy_(y) under torch.no_grad(); name any other new tensor anew: x = y."
        )


def refuse_detaching(name: str, args: Sequence[Any], where: str) -> None:
    """Refuse ``x.detach_()``, which an exported program forgets, where ``x`` has a gradient."""
    if name == "detach_" and args[0].requires_grad:
        raise CaptureError(
            f"detach_() of a tensor that has a gradient is called while the model is captured, at {where}\n"
            "The graph would forget it; name the detached tensor anew: x = x.detach()."
        )
