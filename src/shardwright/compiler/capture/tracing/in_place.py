"""Changes that a graph, which has values alone, would lose: of gradients, which are refused, and of buffers.

Where gradients are off, or by way of ``x.detach()`` and ``x.data``, a tensor gets new values and keeps its gradient.
A buffer that is set, and not written into, is written into at the end of the step, which the exporter knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwright.common import torch_private
from shardwright.compiler.capture.functional.hidden_aliases import overlap
from shardwright.compiler.capture.tracing.outside.places import Place
from shardwright.errors import CaptureError

CHANGE_PARAMETERS = (
    "Change it outside of the loss function, after optimizer.step(), or keep it in a buffer of the model."
)


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
        self._detached: dict[int, torch.Tensor] = {}  # of tensors without a gradient, by their ids, held likewise
        self._parameters: dict[int, str] = {}  # their names by their storages

    def begin(self, model: torch.nn.Module) -> None:
        """Note the parameters of a model whose step begins."""
        self._parameters = {_storage(parameter): name for name, parameter in model.named_parameters()}

    def before(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[torch.Tensor, int, bool]]:
        """Return the tensors that a function may change, with their versions and whether they have gradients."""
        found = [arg for arg in (*args[:1], kwargs.get("out")) if isinstance(arg, torch.Tensor)]
        return [(tensor, torch_private.version(tensor), tensor.requires_grad) for tensor in found if _counts(tensor)]

    def after(self, before: Sequence[tuple[torch.Tensor, int, bool]], result: Any, where: str) -> None:
        """Refuse what a function did, and note what it returns.

        Raises:
            CaptureError: where it changed a parameter, a tensor whose gradient does not know of it, or one that stands
                beside parameters, buffers and the batch.
        """
        for tensor, version, had_gradient in before:
            changed = torch_private.version(tensor) != version
            if changed:
                self._refuse_beside(tensor, where)
                self._refuse_parameter(tensor, where)
            if changed and not had_gradient and self._was_detached(tensor):
                self._refuse_gradient(tensor, where)
            if changed and self._loses_gradient(tensor):
                raise CaptureError(
                    f"a tensor that has a gradient is changed in place behind the back of autograd, at {where}\n"
                    "Make a new one, which has the new values and the old gradient: x = x + (new - x).detach()."
                )
            if _has_gradient(tensor) and _looks_into(result, tensor):
                self._storages[_storage(tensor)] = tensor.untyped_storage()
            if not tensor.requires_grad and _is_detached(result, tensor):
                self._detached[id(result)] = result

    def _was_detached(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor looks into another one, with or without a gradient, of which it was detached."""
        return id(torch_private.base_of(tensor)) in self._detached or _storage(tensor) in self._storages

    def _refuse_beside(self, tensor: torch.Tensor, where: str) -> None:
        """Refuse to change what was there before the step, or a view of it, and is no buffer."""
        base = torch_private.base_of(tensor)
        place = None if torch_private.is_fake(base) else self._place_of(base)
        if place is not None:
            advice = _made_a_buffer(place) if place.kind == "attribute" else _BESIDE
            raise CaptureError(f"{place}{',' * (place.kind != 'attribute')} is changed in place, at {where}\n{advice}")

    def _refuse_parameter(self, tensor: torch.Tensor, where: str) -> None:
        """Refuse to change a parameter, or a view of it."""
        name = self._parameters.get(_storage(tensor)) if torch_private.is_fake(tensor) else None
        if name is not None:
            raise CaptureError(f"the parameter {name} is changed in place, at {where}\n{CHANGE_PARAMETERS}")

    def _refuse_gradient(self, tensor: torch.Tensor, where: str) -> None:
        """Refuse a gradient that comes by a change of what was detached: the tensor that it looks into has none."""
        if tensor.requires_grad:
            raise CaptureError(
                f"a detached tensor is changed in place by one that has a gradient, at {where}\n"
                "Write .clone() behind .detach(), or compute a new tensor in place of the change: what it was detached "
                "from would have the new values without their gradient."
            )

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


def _is_detached(result: Any, tensor: torch.Tensor) -> bool:
    """Return whether a result looks into the memory of ``tensor`` and is no view of it for autograd."""
    is_new = _looks_into(result, tensor) and result is not tensor
    return is_new and torch_private.base_of(result) is result and torch_private.base_of(tensor) is not result


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
            if tensors[other] is not tensors[name] and overlap(tensors[name], tensors[other]):
                raise CaptureError(
                    f"{name} of the model changes, and {other} looks into the same memory, which ranks do not have: "
                    "one would change without the other\nTie modules by one parameter, as in b.weight = a.weight "
                    "without .data; give other tensors memory of their own by .clone()."
                )


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
