"""Random operators.

Those whose row says ``draws`` draw by global position, so that a mask does not depend on how the tensor is split: the
rule of most is that of an elementwise operator. One that draws from the device's generator would differ from rank to
rank: it is refused.
"""

from __future__ import annotations

import torch

from shardwright.compiler.rules.notation import OpRule
from shardwright.compiler.rules.operator import Operator
from shardwright.errors import StrategyError


def draws(op: str) -> bool:
    """Whether torch says of an operator that it draws random numbers."""
    operator: object = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def refuse_drawing(op: str, where: str = "") -> None:
    """Refuse an operator, of which no row says that it draws, where torch says that it does.

    ``where`` is the user's line, where there is one.

    Raises:
        StrategyError: where ``op`` is such an operator.
    """
    if draws(op):
        raise StrategyError(
            f"{op} draws random numbers from each device's own generator, so that ranks would disagree"
            f"{', at ' * bool(where)}{where}\n"
            "Draw them outside of the loss function and pass them in with the batch, or by one of torch's operators "
            "that are drawn by global position, such as torch.rand, randn, randint, bernoulli, multinomial or poisson."
        )


def normal(op: Operator) -> OpRule:
    """normal(mean, std): of tensors that broadcast, or of a tensor and a number; or normal(mean, std, size)."""
    return op.bind(f"{', '.join(['*'] * len(op.operands))} -> *")


def multinomial(op: Operator) -> OpRule:
    """Choices among the last dim of the weights, which are independent of each other with replacement."""
    rows = "b " if len(op.operands[0]) == 2 else ""
    return op.bind(f"{rows}c^ -> {rows}{'s' if op['replacement'] else '.'}")
