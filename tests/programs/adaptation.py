"""Programs that adapt models, or change how they are trained."""

import torch
import torch.nn.functional as F
from torch import nn

from side_by_side import descend


def net():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def classes(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def labelled(rows=12):
    return torch.randn(rows, 8), torch.randint(0, 3, (rows,))


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of low rank beside it."""

    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b) * 2.0


def lora(parallelize):
    """Only the adapters are trained, and only they are given to the optimizer."""
    model = net()
    for name in ("0", "2"):
        setattr(model, name, Adapted(getattr(model, name)))
    model[4].requires_grad_(False)
    batch = labelled()
    parallel = parallelize(model, classes, batch)
    optimizer = torch.optim.AdamW([p for p in parallel.parameters() if p.requires_grad], lr=0.05)
    yield from descend(parallel, optimizer, (batch for _ in range(4)))


def gradual_unfreezing(parallelize):
    """The head is trained first, then everything."""
    model, batch = net(), labelled()
    for layer in model[:4]:
        layer.requires_grad_(False)
    parallel = parallelize(model, classes, batch)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            parallel.module.requires_grad_(True)
        loss = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def sharpness_aware(parallelize):
    """Each step is taken with the gradient at a worse point close by."""
    batch = labelled()
    parallel = parallelize(net(), classes, batch)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for _ in range(3):
        loss = parallel(batch)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parallel.parameters()]).norm()
            steps = [p.grad * (0.05 / norm) for p in parallel.parameters()]
            for p, step in zip(parallel.parameters(), steps, strict=True):
                p.add_(step)
        optimizer.zero_grad()
        parallel(batch).backward()
        with torch.no_grad():
            for p, step in zip(parallel.parameters(), steps, strict=True):
                p.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def lbfgs(parallelize):
    """An optimizer that calls the step itself, several times."""
    batch = labelled()
    parallel = parallelize(net(), classes, batch)
    optimizer = torch.optim.LBFGS(parallel.parameters(), lr=0.5, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = parallel(batch)
        loss.backward()
        return loss

    for _ in range(2):
        yield optimizer.step(closure)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(8, 16), nn.Linear(16, 3), nn.Linear(16, 1)
        self.doubt = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        hidden = self.body(x).relu()
        return self.kind(hidden), self.size(hidden).squeeze(1)


def two_tasks(parallelize):
    """Classes and sizes, weighted by what the model learns about its own doubt; rare classes count more."""
    weight = torch.tensor([1.0, 2.0, 5.0])

    def loss_fn(model, batch):
        x, label, size = batch
        logits, found = model(x)
        parts = torch.stack([F.cross_entropy(logits, label, weight=weight), F.huber_loss(found, size)])
        return ((-model.doubt).exp() * parts + model.doubt).sum(), parts.detach()

    batch = (*labelled(), torch.randn(12))
    parallel = parallelize(Tasks(), loss_fn, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    for _ in range(3):
        loss, parts = parallel(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
        yield parts.sum()


def normed_weights(parallelize):
    """Weight and spectral normalisation as parametrizations."""
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)), nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(16, 3)),
    )  # fmt: skip
    batch = labelled()
    parallel = parallelize(model, classes, batch)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))


class Step(torch.autograd.Function):
    """The sign forward, the identity near zero backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binary(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.down(Step.apply(self.up(x)))


def straight_through(parallelize):
    """Binary activations, with a backward of their own."""
    batch = labelled()
    parallel = parallelize(Binary(), classes, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.05)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))
