"""Compares two captures, so that what was made of one may serve the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.common import trees
from shardwright.compiler.capture.ir import Capture, Node
from shardwright.compiler.capture.tracing.literals import literal
from shardwright.compiler.rules.notation import Operand


def same_step(one: Capture, other: Capture) -> bool:
    """Return whether what was planned and made of one capture of a model is what would be made of the other.

    They are of one graph at the same lines, with the same constants, read the same places of Python, and return the
    same beside tensors. Constants that are read anew at each step may hold something else. Where it is not certain
    that captures are the same they are two.
    """
    return (
        (one.digest, one.tied, one.frozen, one.outside) == (other.digest, other.tied, other.frozen, other.outside)
        and [_where(node) for node in one.nodes] == [_where(node) for node in other.nodes]
        and one.constants.keys() == other.constants.keys()
        and all(
            same_bits(one.constants[name], other.constants[name]) for name in one.constants if name not in one.outside
        )
        and _same_beside(one.aux_spec, other.aux_spec)
    )


def _where(node: Node) -> tuple[Any, ...]:
    return node.name, node.scope, node.source, node.pin


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two plain tensors have the same form and the same bits: 0 and -0 have not, NaN and NaN have."""
    form, other_form = ((type(t), t.dtype, t.shape, t.stride(), t.device) for t in (one, other))
    if form != other_form or type(one) is not Tensor or one.layout != torch.strided or one.is_meta:
        return False
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _same_beside(one: Any, other: Any) -> bool:
    """Return whether what is returned beside the loss is the same but for the numbers in its tensors."""
    if one is None or other is None:
        return one is other
    (leaves, spec), (others, other_spec) = (trees.tree_flatten(of.tree) for of in (one, other))
    if spec != other_spec or [path for path, _ in leaves] != [path for path, _ in others]:
        return False
    return all(_same_value(value, beside) for (_, value), (_, beside) in zip(leaves, others, strict=True))


def _same_value(one: Any, other: Any) -> bool:
    """Of values that are no plain ones, the same object alone is the same."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, (Operand, torch.device)):
        return bool(one == other)
    written = literal(one)
    return written is not None and written == literal(other)
