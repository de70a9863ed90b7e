"""What torch's own functions do by values of tensors is captured where it can be, and equals plain PyTorch."""

import pytest
import torch
from torch import nn
from torch.distributions import (
    Bernoulli,
    Categorical,
    Distribution,
    Independent,
    MultivariateNormal,
    Normal,
    kl_divergence,
)
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from rows import slow
from shardwright.compiler.capture.capture import capture
from whole import like_plain

pytestmark = pytest.mark.usefixtures("float64")


# CTC: 8 samples of 12 steps, targets of up to 5 of 6 symbols.

SYMBOLS, STEPS, SAMPLES = 7, 12, 8


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 16), nn.Linear(16, SYMBOLS)

    def forward(self, x):
        return self.out(self.inner(x).tanh()).log_softmax(-1).transpose(0, 1)


def spoken():
    targets = torch.randint(1, SYMBOLS, (SAMPLES, 5))
    input_lengths = torch.tensor([12, 11, 10, 12, 12, 9, 12, 3])
    return torch.randn(SAMPLES, STEPS, 6), targets, input_lengths, torch.tensor([5, 3, 0, 1, 4, 2, 5, 3])


def padded(model, batch):
    x, targets, input_lengths, target_lengths = batch
    return F.ctc_loss(model(x), targets, input_lengths, target_lengths)


def zeroed(model, batch):
    x, targets, input_lengths, target_lengths = batch
    short = input_lengths.where(input_lengths > 3, 1)  # too short for its target: an infinite loss
    return nn.CTCLoss(zero_infinity=True)(model(x), targets, short, target_lengths)


def summed(model, batch):
    x, targets, input_lengths, target_lengths = batch
    return F.ctc_loss(model(x), targets, input_lengths, target_lengths, blank=0, reduction="sum")


def weighted(model, batch):
    x, targets, input_lengths, target_lengths = batch
    losses = F.ctc_loss(model(x), targets, input_lengths, target_lengths, reduction="none")
    return (losses * torch.arange(SAMPLES)).mean()


def concatenated(model, batch):
    x, targets, input_lengths, _ = batch
    together = targets.flatten()[:19]
    return F.ctc_loss(model(x), together, input_lengths, torch.tensor([5, 3, 0, 1, 2, 2, 3, 3]))


def concatenated_by_tuples(model, batch):
    lengths = (5, 3, 0, 1, 2, 2, 3, 3)
    return F.ctc_loss(model(batch[0]), batch[1].flatten()[:19], (STEPS,) * SAMPLES, lengths)


def by_tuples(model, batch):
    return F.ctc_loss(model(batch[0]), batch[1], (STEPS,) * SAMPLES, [5, 3, 0, 1, 4, 2, 5, 3])


def one_sample(model, batch):
    x, targets, input_lengths, target_lengths = batch
    return F.ctc_loss(model(x)[:, 0], targets[0], input_lengths[0], target_lengths[0])


@pytest.mark.parametrize(
    "loss_fn",
    [zeroed, concatenated, *slow(padded, summed, weighted, concatenated_by_tuples, by_tuples, one_sample)],
)
def test_ctc(loss_fn):
    plans = like_plain(Recogniser(), loss_fn, spoken())
    split = [any(plan.strategies[n.name].axes) for plan in plans for n in plan.capture.nodes if "ctc" in n.op]
    assert split[0] or loss_fn is one_sample  # in mode data


# Distributions and covariances


class Gaussian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.scale = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.mean(x), F.softplus(self.scale(x)) + 0.1


def numbers():
    return torch.randn(8, 6), torch.randn(8, 4)


def normal(model, batch):
    mean, scale = model(batch[0])
    found, prior = Normal(mean, scale), Normal(torch.zeros(4), torch.ones(4))
    return (kl_divergence(found, prior) - found.log_prob(batch[1]) + found.entropy()).mean()


def categorical(model, batch):
    mean, scale = model(batch[0])
    chosen = batch[1].argmax(-1)
    found, other = Categorical(logits=mean), Categorical(probs=scale)
    return (kl_divergence(found, other) - found.log_prob(chosen) - other.entropy()).sum()


def bernoulli(model, batch):
    return -Bernoulli(logits=model(batch[0])[0]).log_prob((batch[1] > 0).double()).mean()


def multivariate(model, batch):
    mean, scale = model(batch[0])
    found = MultivariateNormal(mean, scale_tril=torch.diag_embed(scale))
    other = MultivariateNormal(torch.zeros(4), torch.eye(4) * 2)
    return (kl_divergence(found, other) - found.log_prob(batch[1])).mean()


def validated(model, batch):
    mean, scale = model(batch[0])
    return -Independent(Normal(mean, scale, validate_args=True), 1).log_prob(batch[1]).mean()


def gaussian_nll(model, batch):
    mean, scale = model(batch[0])
    small = F.gaussian_nll_loss(mean, batch[1], scale[:, :1].square(), eps=0.5, reduction="none")
    return F.gaussian_nll_loss(mean, batch[1], scale.square(), full=True) + small[:, 0].sum()


def covariance(model, batch):
    return torch.cov(model(batch[0])[0].T).square().sum() + batch[1].cov(correction=0).diagonal().sum()


def weighted_covariance(model, batch):
    mean, scale = model(batch[0])
    times = torch.arange(1, 9)
    both = torch.cov(mean.T, fweights=times, aweights=scale.detach()[:, 0])
    return both.square().sum() + torch.cov(scale.T, fweights=times).sum() + torch.cov(mean[:, 0])


def correlation(model, batch):
    return torch.corrcoef(model(batch[0])[0].T).square().sum() + model(batch[0])[1].corrcoef().sum()


@pytest.mark.parametrize(
    "loss_fn",
    [
        multivariate, gaussian_nll, covariance,
        *slow(normal, categorical, bernoulli, validated, weighted_covariance, correlation),
    ],
)  # fmt: skip
def test_torchs_own_checks_and_statistics(loss_fn):
    before = Distribution._validate_args
    like_plain(Gaussian(), loss_fn, numbers())
    assert Distribution._validate_args is before


class Straight(nn.Module):
    """Rounds with the gradient of the identity, and keeps a mean in a buffer, by way of ``data``."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        x = self.linear(x)
        self.mean.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)
        rounded = x + (x.round() - x).data
        return rounded + (rounded.clamp(min=0) - rounded).detach()


def test_data_is_what_is_detached():
    like_plain(
        Straight(), lambda model, batch: (model(batch[0]) - batch[1] + model.mean).square().mean(), numbers(), (2,)
    )


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(4))

    def forward(self, x):
        return self.layers(x, mask=self.mask)


def test_a_mask_that_torch_compares_with_the_causal_one():
    model = Masked()
    like_plain(model, lambda model, x: model(x).square().mean(), torch.randn(8, 4, 8))
    captured = capture(model, lambda model, x: (model(x).square().mean(), model(x)), torch.randn(8, 4, 8), "predict")
    assert captured.aux


# What the refusals say to write instead


class Remedies(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.experts = nn.LSTM(6, 4, batch_first=True), nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, lengths, chosen):
        last = self.lstm(x)[0][torch.arange(len(x)), lengths - 1]
        return sum(torch.where((chosen == i).unsqueeze(1), expert(last), 0) for i, expert in enumerate(self.experts))


def with_shapes_of_values(model, x, lengths, chosen):
    last = model.lstm(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1][0][-1]
    out = torch.zeros_like(last)
    for i, expert in enumerate(model.experts):
        rows = torch.where(chosen == i)[0]
        out[rows] = expert(last[rows])
    return out


def test_remedies_give_the_same_and_are_captured():
    model, batch = Remedies(), (torch.randn(8, 5, 6), torch.tensor([5, 3, 1, 2, 4, 5, 2, 1]), torch.arange(8) % 3)
    torch.testing.assert_close(model(*batch), with_shapes_of_values(model, *batch))
    like_plain(model, lambda model, batch: model(*batch)[batch[1][0] - 1].square().sum(), batch, (2,))


def one_entry(model, x):
    y, i = model(x).view(8, 2, 2), x.argmax() % 2
    return y[i, i].sum() + y[:, i].square().sum() * y[:, None, i, i + 1 - 1].sum()


def test_an_index_that_is_a_tensor_of_one_number():
    like_plain(nn.Linear(6, 4), one_entry, torch.randn(8, 6), (2,))
