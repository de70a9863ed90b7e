"""Programs that draw random numbers inside of their loss function."""

import torch
import torch.nn.functional as F
from torch import nn

from side_by_side import descend


class Reader(nn.Module):
    """Two layers of an LSTM with dropout between them, and noisy slopes."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 4)
        self.slopes = nn.RReLU()

    def forward(self, x):
        return self.head(self.slopes(self.lstm(x)[0][:, -1]))


def trained(parallelize, model, loss_fn, batch):
    parallel = parallelize(model, loss_fn, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    yield from descend(parallel, optimizer, (batch for _ in range(4)))


def mixup_in_the_step(parallelize):
    """Each sample is mixed with another one, which the step draws."""

    def loss_fn(model, batch):
        x, y = batch
        order, share = torch.randperm(len(x)), torch.empty(len(x)).uniform_(0.2, 0.8)
        logits = model(share[:, None, None] * x + (1 - share)[:, None, None] * x[order])
        losses = [F.cross_entropy(logits, target, reduction="none") for target in (y, y[order])]
        return (share * losses[0] + (1 - share) * losses[1]).mean()

    yield from trained(parallelize, Reader(), loss_fn, (torch.randn(12, 5, 6), torch.randint(0, 4, (12,))))


def discrete_latents(parallelize):
    """A code of categories, drawn by Gumbel's noise, and a policy whose actions are drawn."""

    def loss_fn(model, x):
        logits = model["encoder"](x).view(len(x), 3, 4)
        code = F.gumbel_softmax(logits, tau=0.7, hard=True)
        actions = torch.multinomial(logits[:, 0].softmax(1), 2, replacement=True)
        chosen = logits[:, 0].log_softmax(1).gather(1, actions)
        masked = torch.where(torch.randint_like(x, 4) > 0, x, 0)
        return F.mse_loss(model["decoder"](code.flatten(1)), masked) - 0.1 * (chosen * actions).mean()

    model = nn.ModuleDict({"encoder": nn.Linear(8, 12), "decoder": nn.Linear(12, 8)})
    yield from trained(parallelize, model, loss_fn, torch.randn(14, 8))
