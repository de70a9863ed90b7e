"""Random operators.

They draw by global position, so that a mask does not depend on how the tensor is split: the rule is that of an
elementwise operator. An operator that draws from the device's generator would differ from rank to rank: it is refused.
"""

from __future__ import annotations

import torch

from shardwright.errors import StrategyError
from shardwright.rules.operator import Operator

# Drawn by global position.
LINES = {
    "aten.native_dropout": "~ * -> ~ *, *",
    "aten.dropout": "~ * -> ~ *",
    "aten.bernoulli.p": "* -> *",
    "aten.bernoulli.default": "* -> *",
    "aten.rand_like": "* -> *",
    "aten.randn_like": "* -> *",
    "aten.rand.default": "-> *",
    "aten.randn.default": "-> *",
}


def refuse_unlisted(op: str) -> None:
    """Refuse an operator that draws random numbers in a way that we cannot make independent of the split.

    Raises:
        StrategyError: where ``op`` is such an operator.
    """
    found: object = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    if torch.Tag.nondeterministic_seeded in getattr(found, "tags", ()):
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
