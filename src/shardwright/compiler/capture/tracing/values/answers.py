"""Branches in torch's own code that look at values of tensors, and the way that a capture takes there.

Most are checks that raise an error, which pass. A program does not check again: where one device would raise, it gives
what the formula gives. What the user's own code asks is refused elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from shardwright.common import torch_private
from shardwright.compiler.capture.tracing.sources import path_in_torch

# Below torch's folder, file and function -> what ``bool(tensor)`` gives there.
_ANSWERS: Mapping[tuple[str, str], bool] = {
    ("distributions/distribution.py", "__init__"): True,
    ("distributions/distribution.py", "_validate_sample"): True,
    ("distributions/constraints.py", "check"): True,
    ("distributions/continuous_bernoulli.py", "__init__"): True,
    ("distributions/geometric.py", "__init__"): True,
    ("distributions/kl.py", "_kl_binomial_binomial"): False,
    ("distributions/wishart.py", "__init__"): False,
    # Not causal for all that is known: the mask is then given to attention as it is, with the same numbers.
    ("nn/modules/transformer.py", "_detect_is_causal_mask"): False,
}


def answer(name: str, args: Sequence[Any], frame: FrameType) -> bool | None:
    """Return the answer to ``name`` of a tensor that ``frame``, of torch's own code, calls; or None."""
    if name != "__bool__" or not torch_private.has_no_value(args[0]):
        return None
    code = frame.f_code
    return _ANSWERS.get((path_in_torch(code.co_filename), code.co_name))
