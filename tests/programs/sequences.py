"""Programs that learn from sequences."""

import random

import torch
import torch.nn.functional as F
from torch import nn


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.lstm(x)[0]).log_softmax(-1)


def lstm_ctc(parallelize):
    """Characters from frames, without knowing which frame has which."""

    def loss_fn(model, batch):
        frames, text, lengths = batch
        steps = torch.full((len(frames),), frames.shape[1], dtype=torch.long, device=frames.device)
        return F.ctc_loss(model(frames).transpose(0, 1), text, steps, lengths, zero_infinity=True)

    batch = torch.randn(6, 9, 6), torch.randint(1, 5, (6, 3)), torch.tensor([3, 2, 3, 1, 2, 3])
    parallel = parallelize(Recognizer(), loss_fn, batch)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    for _ in range(3):
        loss = parallel(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.kept = (True,) * 4

    def forward(self, x):
        for layer, kept in zip(self.layers, self.kept, strict=True):
            if kept:
                x = x + layer(x).tanh()
        return x


def layer_drop(parallelize):
    """Layers are left out at random; which ones is decided before the step, so that all ranks drop the same."""
    model, batch = Dropping(), torch.randn(9, 8)
    parallel = parallelize(model, lambda model, x: model(x).square().mean(), batch)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(4):
        parallel.module.kept = tuple(random.random() > 0.3 for _ in range(4))
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
