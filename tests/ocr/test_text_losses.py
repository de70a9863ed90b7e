"""The losses of text detection and recognition beside computations that take no short cuts."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.ocr.networks.losses import DetectionLoss, Targets, ctc_loss, detection_loss, first_steps_loss
from whole import like_plain


def collapsed(path, blank):
    return tuple(now for before, now in zip((blank, *path), path, strict=False) if now not in (before, blank))


def by_every_path(logits, text):
    """The negative log-likelihood of a text as the sum over all paths that say it."""
    probabilities, blank = logits.softmax(-1), logits.shape[-1] - 1
    total = sum(
        math.prod(float(probabilities[t, c]) for t, c in enumerate(path))
        for path in itertools.product(range(blank + 1), repeat=len(logits))
        if collapsed(path, blank) == tuple(text)
    )
    return -math.log(total) if total else 0.0  # what does not fit counts as zero


def test_ctc_sums_over_all_paths_and_averages_over_samples():
    torch.manual_seed(0)
    logits = torch.randn(4, 4, 3, dtype=torch.float64)
    texts = [(0,), (1, 0), (0, 0), (1, 1, 1)]  # the last needs five steps
    padded = torch.tensor([[*text, 0, 0, 0][:3] for text in texts])
    expected = [by_every_path(one, text) for one, text in zip(logits, texts, strict=True)]
    assert expected[-1] == 0.0
    found = ctc_loss(logits, padded, torch.tensor(list(map(len, texts))))
    assert float(found) == pytest.approx(sum(expected) / 4, rel=1e-12)


def reference(probability, threshold, targets):
    """The detector's loss pixel by pixel, in Python's numbers."""
    p, t = (1 / (1 + (-x).exp()) for x in (probability, threshold))
    both = each = distance = near = cross = count = 0.0
    for image in range(len(p)):
        negatives, positives = [], 0.0
        for at in itertools.product(range(p.shape[1]), range(p.shape[2])):
            here = (image, *at)
            pixel, text, valid = float(p[here]), float(targets.text[here]), float(targets.valid[here])
            binary = 1 / (1 + math.exp(-50 * (pixel - float(t[here]))))
            both += binary * text * valid
            each += (binary + text) * valid
            distance += abs(float(t[here]) - float(targets.border[here])) * float(targets.near[here])
            near += float(targets.near[here])
            if text * valid:
                cross -= math.log(pixel)
                positives += 1
            elif valid:
                negatives.append(-math.log(1 - pixel))
        kept = max(min(len(negatives), 3 * positives), 10)
        cross += sum(sorted(negatives, reverse=True)[: int(kept)])
        count += positives + kept
    return 1 - 2 * both / (each + 1e-6) + 10 * distance / (near + 1e-6) + 5 * cross / count


def maps(share, rows=2):
    return Targets(*((torch.rand(rows, 5, 7) < s).double() for s in (share, 0.8, 0.5, 0.5)))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.6, 1.0])
def test_the_detector_is_trained_by_what_the_paper_says(share):
    """Without texts, with few (three negatives for each), and with so many that all negatives are kept."""
    torch.manual_seed(0)
    probability, threshold = torch.randn(2, 2, 5, 7, dtype=torch.float64)
    targets = maps(share)
    assert float(DetectionLoss()(probability, threshold, targets)) == pytest.approx(
        reference(probability, threshold, targets), rel=1e-9
    )


@given(st.floats(0, 1), st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_any_maps_have_a_finite_loss_and_gradient(share, seed):
    torch.manual_seed(seed)
    logits = (100 * torch.randn(2, 1, 5, 7)).requires_grad_()  # also where a sigmoid is 0 or 1
    targets = Targets(*(tensor.float() for tensor in (lambda m: (m.text, m.valid, m.border, m.near))(maps(share, 1))))
    loss = DetectionLoss()(logits[0], logits[1], targets)
    loss.backward()
    assert math.isfinite(loss.item())
    assert logits.grad.isfinite().all()


class Pixels(torch.nn.Module):
    """The smallest of detectors: both maps are an image times a number."""

    def __init__(self):
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.tensor([0.7, -0.4], dtype=torch.float64))

    def forward(self, images):
        return images[:, 0] * self.slopes[0], images[:, 0] * self.slopes[1]


def test_quotients_are_of_sums_over_all_ranks():
    """Texts are unlike in images, so that a mean of each rank's loss would be another number."""
    torch.manual_seed(0)
    texts = torch.stack([torch.rand(5, 7) < share for share in (0.0, 0.05, 0.9, 0.5, 0.1)]).double()
    batch = torch.randn(5, 3, 5, 7).double(), texts, torch.ones_like(texts), 0.3 + 0.4 * texts, texts
    plans = like_plain(Pixels(), detection_loss(DetectionLoss()), batch, sizes=(3,), tolerance=1e-11)
    assert all(any(s.axes for s in plan.strategies.values()) for plan in plans if plan.mode == "data")


def test_the_overlap_may_stand_in_the_place_of_the_cross_entropy():
    torch.manual_seed(1)
    probability, threshold = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    maps = [(torch.rand(2, 4, 4, dtype=torch.float64) < share).double() for share in (0.4, 0.8, 0.5, 0.6)]
    targets = Targets(*maps)
    p = torch.sigmoid(probability)
    both = (p * targets.text * targets.valid).sum()
    each = (p * targets.valid).sum() + (targets.text * targets.valid).sum() + 1e-6
    alone = DetectionLoss(bce_scale=0)(probability, threshold, targets)
    whole = DetectionLoss(overlap=True)(probability, threshold, targets)
    assert float(whole) == pytest.approx(float(alone + 5 * (1 - 2 * both / each)), rel=1e-12)


def test_the_first_steps_alone_are_compared_where_a_length_is_given():
    torch.manual_seed(2)
    logits = torch.randn(3, 5, 4, dtype=torch.float64)
    model = torch.nn.Identity()
    model.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    batch = logits, torch.tensor([[0, 1], [2, 0], [1, 1]]), torch.tensor([2, 1, 2])
    assert float(first_steps_loss(4)(model, batch)) == float(ctc_loss(logits[:, :4], *batch[1:]))
    assert float(first_steps_loss(None)(model, batch)) == float(ctc_loss(*batch))
    assert float(first_steps_loss(4)(model, batch)) != float(ctc_loss(*batch))
