"""Captures that the fork server of `ranks` makes once: what torch finds out in these, ranks need not once more.

Of tensors whose values nobody reads, so that no kernel runs that might begin threads. Torch remembers the shapes that
operators give, so that a rank captures a network of `models` with as many rows in two thirds of the time.
"""

import gc

import torch

from models import NETWORKS
from shardwright.compiler.capture.step import captured_step
from shardwright.runtime.programs.plan_cache import planner_digest

gc.freeze()  # what is imported by now lives on, and a collection that looks through it takes a third of a second
for dtype in (torch.float64, torch.float32):  # the one of many tests, and the usual one, which stays
    torch.set_default_dtype(dtype)
    for make, loss_fn, batch_of in NETWORKS.values():
        with torch.device("meta"):
            model = make()
        captured_step(model.to_empty(device="cpu"), loss_fn, batch_of(8), {})
planner_digest()
