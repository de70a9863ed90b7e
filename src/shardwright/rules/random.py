"""Random operators.

Those whose row says ``draws`` draw by global position, so that a mask does not depend on how the tensor is split: the
rule is that of an elementwise operator. One that draws from the device's generator would differ from rank to rank: it
is refused.
"""

from __future__ import annotations

import torch

from shardwright.errors import StrategyError
from shardwright.rules.operator import Operator


def draws(op: str) -> bool:
    """Whether torch says of an operator that it draws random numbers."""
    operator: object = torch.ops
    for part in op.split("."):
        operator = getattr(operator, part, None)
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


def refuse_drawing(op: str) -> None:
    """Refuse an operator, of which no row says that it draws, where torch says that it does.

    Raises:
        StrategyError: where ``op`` is such an operator.
    """
    if draws(op):
        raise StrategyError(
            f"{op} draws random numbers from each device's own generator, so that ranks would disagree; "
            "draw them with torch.rand, torch.randn, torch.bernoulli or dropout, which are drawn by global position, "
            "or pass them in with the batch"
        )


def recurrent_without_dropout(op: Operator) -> None:
    """Refuse dropout between the layers of a recurrent network, which draws inside the operator.

    Raises:
        StrategyError: where the operator drops anything.
    """
    if op["dropout"] and op["train"]:
        raise StrategyError(
            f"{op.op} drops {op['dropout']:g} between its layers with random numbers of each device's own; "
            "use one layer per module, with torch.nn.Dropout between them"
        )
