"""The capture that the fork server of `ranks` makes once, in which torch goes through all its operators.

Tensors without values are captured, so that nothing is drawn and no kernel runs, which might begin threads.
"""

import torch
from torch import nn

from shardwright.compiler.capture.step import captured_step

with torch.device("meta"):
    captured_step(nn.Linear(2, 2), lambda model, x: model(x).square().mean(), torch.ones(2, 2), {})
