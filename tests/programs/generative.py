"""Programs that learn to make samples."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from side_by_side import descend


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))


def gan(parallelize):
    """Two losses over one module, an optimizer for each half, alternating steps."""

    def critic_loss(model, batch):
        real, noise = batch
        fake = model.generator(noise).detach()
        return F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake)).mean()

    def generator_loss(model, noise):
        return F.softplus(-model.critic(model.generator(noise))).mean()

    model = Gan()
    real, noise = torch.randn(12, 6), torch.randn(12, 4)
    criticise = parallelize(model, critic_loss, (real, noise))
    generate = parallelize(model, generator_loss, noise)
    of_critic = torch.optim.Adam(model.critic.parameters(), lr=0.01, betas=(0.5, 0.9))
    of_generator = torch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
    for _ in range(3):
        noise = torch.randn(12, 4)
        loss = criticise((real, noise))
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
        yield loss
        loss = generate(noise)
        loss.backward()
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()  # the generator's loss went through the critic
        yield loss


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 16), nn.Linear(4, 16)
        self.mean, self.spread, self.out = nn.Linear(16, 4), nn.Linear(16, 4), nn.Linear(16, 12)

    def forward(self, x, noise):
        hidden = self.encoder(x).relu()
        mean, log_variance = self.mean(hidden), self.spread(hidden)
        code = mean + noise * (0.5 * log_variance).exp()
        return self.out(self.decoder(code).relu()), mean, log_variance


def vae(parallelize):
    """Reconstruction and divergence, the noise of the code passed with the batch, the divergence's weight annealed."""

    def loss_fn(model, batch):
        x, noise, weight = batch
        logits, mean, log_variance = model(x, noise)
        reconstruction = F.binary_cross_entropy_with_logits(logits, x, reduction="none").sum(1).mean()
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return reconstruction + weight * divergence, {"divergence": divergence}

    model = Vae()
    x = torch.rand(10, 12)
    parallel = parallelize(model, loss_fn, (x, torch.randn(10, 4), torch.tensor(0.0)))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for step in range(4):
        loss, aux = parallel((x, torch.randn(10, 4), torch.tensor(step / 4)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
        yield aux["divergence"]


class Denoiser(nn.Module):
    def __init__(self, steps=50):
        super().__init__()
        self.time = nn.Embedding(steps, 16)
        self.up, self.middle, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.register_buffer("kept", torch.cos(torch.linspace(0, math.pi / 2 - 0.1, steps)).square())

    def forward(self, x, t):
        hidden = F.silu(self.up(x) + self.time(t))
        return self.down(hidden + F.silu(self.middle(hidden)))


def diffusion(parallelize):
    """Predicts the noise that was added; steps and noise are drawn in the loss function."""

    def loss_fn(model, x):
        t = torch.randint(0, len(model.kept), (len(x),), device=x.device)
        noise = torch.randn_like(x)
        kept = model.kept[t][:, None]
        return F.mse_loss(model(kept.sqrt() * x + (1 - kept).sqrt() * noise, t), noise)

    x = torch.randn(12, 8)
    parallel = parallelize(Denoiser(), loss_fn, x)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    for _ in range(4):
        loss = parallel(x)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class Coupling(nn.Module):
    def __init__(self, flipped):
        super().__init__()
        self.flipped = flipped
        self.net = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 6))

    def forward(self, x):
        a, b = x.chunk(2, dim=1)
        if self.flipped:
            a, b = b, a
        scale, shift = self.net(a).chunk(2, dim=1)
        scale = torch.tanh(scale)
        b = b * scale.exp() + shift
        return torch.cat((b, a) if self.flipped else (a, b), dim=1), scale.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4))

    def forward(self, x):
        total = x.new_zeros(len(x))
        for step in self.steps:
            x, log_determinant = step(x)
            total = total + log_determinant
        return x, total


def normalizing_flow(parallelize):
    """Maximum likelihood under a standard normal distribution of `torch.distributions`."""

    def loss_fn(model, x):
        z, log_determinant = model(x)
        prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z))
        return -(prior.log_prob(z).sum(1) + log_determinant).mean()

    x = torch.randn(12, 6) * 2 + 1
    parallel = parallelize(Flow(), loss_fn, x)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, (x for _ in range(4)))


class Quantizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(4, 8)
        self.codes = nn.Embedding(6, 4)

    def forward(self, x):
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(1)
        code = self.codes(nearest)
        through = z + (code - z).detach()
        return self.decoder(through), F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


def vector_quantization(parallelize):
    """The nearest code, with a gradient that passes straight through it."""

    def loss_fn(model, x):
        out, commitment = model(x)
        return F.mse_loss(out, x) + commitment

    x = torch.randn(16, 8)
    parallel = parallelize(Quantizer(), loss_fn, x)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, (x for _ in range(4)))
