"""Signatures of torch's operators: what they take and return, and what of it they change or share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwright.common.torch_private import schema

_OPERATOR = type(torch.ops.aten.add.Tensor)  # which has no public name


def _operator(op: str) -> Any:
    """Return what ``"aten.split.Tensor"`` or ``"aten.split"`` names, None where that is no operator."""
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    return found


def is_operator(target: Any) -> bool:
    """Return whether a node's target is an operator, as ``torch.ops.aten.add.Tensor``."""
    return isinstance(target, _OPERATOR)


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator: ``is_tensor`` says that a tensor may stand there, and not a list of tensors."""

    name: str
    default: Any
    is_tensor: bool


def schema_parameters(op: str) -> tuple[Parameter, ...]:
    """Return the parameters of ``"aten.linear.default"``, in order."""
    return _parameters_of(_operator(op))


@lru_cache(maxsize=4096)
def _parameters_of(operator: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an operator.

    Cached by the operator itself, whose schema never changes; by its name a user may have defined another one.
    """
    return tuple(
        Parameter(a.name, a.default_value, str(a.type) in ("Tensor", "Optional[Tensor]"))
        for a in schema(operator).arguments
    )


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names, with its defaults for those that are left out."""
    known = schema(operator).arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.default_value is not None}
    return defaults | dict(zip((argument.name for argument in known), args, strict=False)) | dict(kwargs)


def without_defaults(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without defaults at their end, as Python leaves them out.

    C++ takes no missing tensor for one.
    """
    count = len(args)
    for arg, argument in zip(reversed(args), reversed(schema(operator).arguments[:count]), strict=True):
        default = argument.default_value
        if not argument.has_default_value() or type(arg) is not type(default) or arg != default:
            break
        count -= 1
    return args[:count]


def overloads_of(op: str) -> tuple[str, ...]:
    """Return the full names of the operators that ``"aten.split"`` or ``"aten.split.Tensor"`` stands for.

    There are none where torch has none.
    """
    found = _operator(op)
    if is_operator(found):
        return (op,)
    return tuple(f"{op}.{one}" for one in found.overloads()) if hasattr(found, "overloads") else ()


def tensors_taken(op: str) -> int | None:
    """Return how many tensors an operator takes, those that may be left out too.

    None where it takes lists of them, and for what is no operator of torch's.
    """
    found = _operator(op)
    return None if found is None else _tensors(argument.type for argument in schema(found).arguments)


def tensors_returned(op: str) -> int | None:
    """Return how many tensors an operator returns; None as of `tensors_taken`."""
    found = _operator(op)
    return None if found is None else _tensors(value.type for value in schema(found).returns)


def _tensors(types: Iterable[Any]) -> int | None:
    names = [str(type) for type in types]
    if any("Tensor" in name and name.startswith("List") for name in names):
        return None
    return sum(name in ("Tensor", "Optional[Tensor]") for name in names)


def takes_lists(operator: Any) -> bool:
    """Return whether an operator takes lists of tensors: only its schema tells."""
    return any(str(argument.type).startswith("List[Tensor") for argument in schema(operator).arguments)


def returns_list(op: str) -> bool:
    """Return whether ``"aten.split.Tensor"`` returns a list of tensors, even of one."""
    found = _operator(op)
    return found is not None and [str(value.type) for value in schema(found).returns] == ["List[Tensor]"]


def is_view(operator: Any) -> bool:
    """Return whether an operator gives a view of its operand: only operators themselves tell."""
    return bool(operator.is_view)


def changes_view(operator: Any) -> bool:
    """Return whether an operator turns its operand itself into a view, as ``x.t_()``: the tags are not documented."""
    return torch.Tag.inplace_view in operator.tags


def changes_operands(operator: Any) -> bool:
    """Return whether an operator writes into an operand, as its schema says."""
    return bool(schema(operator).is_mutable)


@lru_cache(maxsize=4096)
def written_operands(operator: Any) -> tuple[tuple[int, str], ...]:
    """Return position and name of each operand that an operator writes into, as its schema says.

    Cached by the operator itself, as `keeps_statistics`.
    """
    return tuple((i, argument.name) for i, argument in enumerate(schema(operator).arguments) if argument.is_write)


def shared_operands(operator: Any) -> frozenset[int]:
    """Return the positions of the operands into whose memory the results of an operator look, as its schema says."""
    if all(value.alias_info is None for value in schema(operator).returns):
        return frozenset()
    return frozenset(i for i, argument in enumerate(schema(operator).arguments) if argument.alias_info is not None)


def makes_new(operator: Any) -> bool:
    """Check that an operator returns neither what it was given nor views of it."""
    return not any(value.alias_info is not None for value in schema(operator).returns)


def writes_out(target: Any) -> bool:
    """Return whether the target of a node is an operator that writes into an argument ``out``, as its schema says."""
    return is_operator(target) and any(argument.is_out for argument in schema(target).arguments)


@lru_cache(maxsize=4096)
def keeps_statistics(operator: Any) -> bool:
    """Return whether an operator takes running statistics.

    Some write into them without a word of it in their schema, as those of cuDNN do.

    Cached by the operator itself, whose schema never changes: one that is defined anew is another object.
    """
    return any(argument.name == "running_mean" for argument in schema(operator).arguments)


# Those of torch's operators on lists that do not work entry by entry; operators on lists have no tags that tell.
_NOT_ENTRYWISE = ("_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum")
_UNTAGGED = ("copy_", "fill_", "masked_fill_", "zero_")
_FUSED_STEPS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


@lru_cache(maxsize=4096)
def is_entrywise(operator: Any) -> bool:
    """Return whether each entry of an operator's results follows from those of its operands at the same place alone.

    Cached by the operator itself: one that is defined anew is another object.
    """
    name = operator.overloadpacket.__name__
    tagged = torch.Tag.pointwise in operator.tags and torch.Tag.nondeterministic_seeded not in operator.tags
    listed = name in _UNTAGGED + _FUSED_STEPS or (name.startswith("_foreach_") and name not in _NOT_ENTRYWISE)
    returns = all("Tensor" in str(value.type) for value in schema(operator).returns)  # not a bool, as torch.equal
    return (tagged or (operator.namespace == "aten" and listed)) and returns and not writes_out(operator)


# Those of one tensor whose result is laid out as that is, beside those that work entry by entry.
_LAID_OUT_ALIKE = ("detach", "alias", "_to_copy", "empty_like", "zeros_like", "ones_like", "full_like")


def keeps_layout(operator: Any) -> bool:
    """Return whether an operator gives of one tensor another of its shape, of whose entries each is made alone."""
    return operator.namespace == "aten" and operator.overloadpacket.__name__ in _LAID_OUT_ALIKE


def is_norm(operator: Any, arguments: Mapping[str, Any]) -> bool:
    """Return whether an operator gives norms over all entries of tensors, to which it is no matter where zeros stand.

    Args:
        arguments: its arguments by their names, with defaults, as `arguments_of` gives them.
    """
    name = operator.overloadpacket.__name__
    listed = operator.namespace == "aten" and name in ("_foreach_norm", "linalg_vector_norm")
    dims = arguments.get("dim")
    return bool(listed and arguments.get("ord", 2) > 0 and dims in (None, []) and not arguments.get("keepdim"))


def looks_for_overflows(operator: Any) -> bool:
    """Return whether an operator is the one by which `GradScaler` divides gradients and looks for infinite ones."""
    return operator is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default


def draws(operator: Any) -> bool:
    """Return whether an operator draws random numbers: the tags are not documented."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def reads_number(operator: Any) -> bool:
    """Return whether an operator is the one by which ``float(x)`` and ``x.item()`` read a number."""
    return operator is torch.ops.aten._local_scalar_dense.default
