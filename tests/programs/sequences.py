"""Programs that learn from sequences."""

import random

import torch
import torch.nn.functional as F
from torch import nn

from side_by_side import descend


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


class Recurrent(nn.Module):
    def __init__(self, words=11):
        super().__init__()
        self.words = nn.Embedding(words, 8, padding_idx=0)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, words, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.gru(self.words(x))[0])


def tied_language_model(parallelize):
    """Embedding and output share their weight; padding is not counted."""

    def loss_fn(model, x):
        return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), ignore_index=0)

    x = torch.randint(1, 11, (7, 9))
    x[2:4, 5:] = 0
    parallel = parallelize(Recurrent(), loss_fn, x)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    yield from descend(parallel, optimizer, (x for _ in range(3)))


class Transformer(nn.Module):
    def __init__(self, words=13, width=16, layers=2):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
        layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words)

    def forward(self, x):
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.out.weight.dtype)
        hidden = self.words(x) + self.places(torch.arange(length, device=x.device))
        return self.out(self.layers(hidden, mask=mask, is_causal=True))


def next_word(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def curriculum(parallelize):
    """Sentences grow from step to step, so that each length is another shape."""
    parallel = parallelize(Transformer(), next_word, torch.randint(0, 13, (6, 5)))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for length in (5, 7, 10, 7):
        loss = parallel(torch.randint(0, 13, (6, length)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss


def accumulation(parallelize):
    """One step from three micro-batches of unequal sizes, the last of each epoch smaller."""
    parallel = parallelize(Transformer(layers=1), next_word, torch.randint(0, 13, (4, 6)))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for _ in range(2):
        parts = [torch.randint(0, 13, (rows, 6)) for rows in (4, 4, 3)]
        total = torch.zeros(())
        for part in parts[:-1]:
            with parallel.accumulate():
                loss = parallel(part) * len(part) / 11
                loss.backward()
            total += loss.detach()
        loss = parallel(parts[-1]) * len(parts[-1]) / 11
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield total + loss.detach()


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(9, 16), nn.Embedding(9, 16)
        self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 9)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.out.weight.dtype)
        hidden = self.net(
            self.source(source), self.target(target), tgt_mask=mask, src_key_padding_mask=source == 0,
            memory_key_padding_mask=source == 0, tgt_is_causal=True,
        )  # fmt: skip
        return self.out(hidden)


def translation(parallelize):
    """Encoder and decoder with padding masks; label smoothing."""

    def loss_fn(model, batch):
        source, target = batch
        logits = model(source, target[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)

    source, target = torch.randint(1, 9, (6, 7)), torch.randint(1, 9, (6, 5))
    source[:3, 5:] = 0
    target[4:, 3:] = 0
    parallel = parallelize(Translator(), loss_fn, (source, target))
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01, betas=(0.9, 0.98), eps=1e-9)
    yield from descend(parallel, optimizer, ((source, target) for _ in range(3)))


class Experts(nn.Module):
    def __init__(self, experts=4, width=8):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 16) * 0.1)
        self.down = nn.Parameter(torch.randn(experts, 16, width) * 0.1)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        best, which = scores.topk(2, dim=-1)
        weight = torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))
        each = torch.einsum("ebh,ehd->ebd", torch.einsum("bd,edh->ebh", x, self.up).relu(), self.down)
        load = F.one_hot(which, scores.shape[-1]).to(x.dtype).sum(1).mean(0)
        return torch.einsum("ebd,be->bd", each, weight), (load * scores.mean(0)).sum() * scores.shape[-1]


class ExpertNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.out = Experts(), nn.Linear(8, 3)

    def forward(self, x):
        hidden, balance = self.experts(x)
        return self.out(hidden), balance


def mixture_of_experts(parallelize):
    """Each sample goes to two of four experts; a second loss balances them over the global batch."""

    def loss_fn(model, batch):
        x, label = batch
        logits, balance = model(x)
        return F.cross_entropy(logits, label) + 0.01 * balance

    batch = torch.randn(12, 8), torch.randint(0, 3, (12,))
    parallel = parallelize(ExpertNet(), loss_fn, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))


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
