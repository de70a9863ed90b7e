"""The losses of text detection and recognition.

Every quotient is of sums over the whole batch, so that a batch that is split gives the quotient of the reduced sums.
Every shape follows from the shape of the batch alone: a number that is counted, as that of the negatives that are kept,
is a value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LossFunction = Callable[[nn.Module, Any], Any]


def _precise(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def ctc_loss(logits: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
    """The mean over samples of the CTC negative log-likelihood.

    ``logits`` [n, steps, classes], the last class being the blank; ``text`` [n, longest] holds ids, of which the first
    ``lengths`` [n] count. A text that does not fit into the steps counts as zero.
    """
    log_probabilities = F.log_softmax(_precise(logits), dim=-1).transpose(0, 1)
    steps = torch.full((logits.shape[0],), logits.shape[1], dtype=torch.long, device=logits.device)
    blank = logits.shape[2] - 1
    losses = F.ctc_loss(log_probabilities, text, steps, lengths, blank, reduction="none", zero_infinity=True)
    return losses.mean()


@dataclass(frozen=True)
class Targets:
    """The targets of a detector in images, each [n, h, w].

    ``text`` is 1 inside the shrunk texts and ``valid`` 1 where that counts; ``border`` is the threshold to learn, which
    counts where ``near`` is 1.
    """

    text: Tensor
    valid: Tensor
    border: Tensor
    near: Tensor


@dataclass(frozen=True)
class DetectionLoss:
    """dice(B) + ``l1_scale`` * L1(T) + ``bce_scale`` * BCE(P), where B = sigmoid(``k`` * (P - T)).

    P and T are the sigmoids of the two logits that a `DBNet` gives in training. With ``overlap`` dice(P) stands in the
    place of the balanced cross entropy BCE(P).
    """

    k: float = 50.0
    l1_scale: float = 10.0
    bce_scale: float = 5.0
    eps: float = 1e-6
    negatives_per_positive: float = 3.0
    fewest_negatives: float = 10.0
    overlap: bool = False

    def __call__(self, probability: Tensor, threshold: Tensor, targets: Targets) -> Tensor:
        probability, threshold = _precise(probability), _precise(threshold)
        p, t = torch.sigmoid(probability), torch.sigmoid(threshold)
        dice = self.dice(torch.sigmoid(self.k * (p - t)), targets)
        l1 = ((t - targets.border).abs() * targets.near).sum() / (targets.near.sum() + self.eps)
        third = self.dice(p, targets) if self.overlap else self.balanced(probability, targets)
        return dice + self.l1_scale * l1 + self.bce_scale * third

    def dice(self, binary: Tensor, targets: Targets) -> Tensor:
        """Return one less the overlap of a map with the texts."""
        both = (binary * targets.text * targets.valid).sum()
        each = (binary * targets.valid).sum() + (targets.text * targets.valid).sum()
        return 1 - 2 * both / (each + self.eps)

    def balanced(self, probability: Tensor, targets: Targets) -> Tensor:
        """The cross entropy of the positives and, of each image, of the negatives that have the largest."""
        losses = F.binary_cross_entropy_with_logits(probability, targets.text, reduction="none")
        positive = (targets.text * targets.valid).flatten(1)
        negative = ((1 - targets.text) * targets.valid).flatten(1)
        positives, negatives = positive.sum(1), negative.sum(1)
        kept = torch.minimum(negatives, self.negatives_per_positive * positives).clamp(min=self.fewest_negatives)
        hardest, _ = (losses.flatten(1) * negative).sort(dim=1, descending=True)
        place = torch.arange(hardest.shape[1], device=hardest.device)
        chosen = torch.where(place < kept.unsqueeze(1), hardest, 0)
        return ((losses.flatten(1) * positive).sum() + chosen.sum()) / (positives.sum() + kept.sum())


def recognition_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the CTC loss of a model for a batch of images, texts and their lengths."""
    images, text, lengths = batch[:3]
    return ctc_loss(model(images.to(_dtype(model))), text, lengths)


def first_steps_loss(steps: int | None) -> LossFunction:
    """Return `recognition_loss` of the first ``steps`` alone that a network gives, or of all."""
    if steps is None:
        return recognition_loss

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        images, text, lengths = batch[:3]
        return ctc_loss(model(images.to(_dtype(model)))[:, :steps], text, lengths)

    return loss_fn


def detection_loss(loss: DetectionLoss) -> LossFunction:
    """``loss_fn(model, batch)`` of a batch (images, text, valid, border, near)."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        dtype = _dtype(model)
        images, *maps = (tensor.to(dtype) for tensor in batch[:5])
        probability, threshold = model(images)
        return loss(probability, threshold, Targets(*maps))

    return loss_fn


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype
