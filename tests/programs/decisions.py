"""Programs that learn to decide, to rank, and to pass messages."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from side_by_side import descend


def policy(actions=4):
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, actions))


def dqn(parallelize):
    """Values of actions against a target network, which takes the weights every other step."""
    model = policy()
    target = copy.deepcopy(model).requires_grad_(False)

    def loss_fn(model, batch):
        state, action, reward, after, done = batch
        value = model(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = model(after).argmax(1, keepdim=True)
            wanted = reward + 0.9 * target(after).gather(1, best).squeeze(1) * (1 - done)
        return F.smooth_l1_loss(value, wanted)

    def replayed():
        done = torch.randint(0, 2, (12,)).to(torch.get_default_dtype())
        return torch.randn(12, 6), torch.randint(0, 4, (12,)), torch.randn(12), torch.randn(12, 6), done

    parallel = parallelize(model, loss_fn, replayed())
    optimizer = torch.optim.RMSprop(parallel.parameters(), lr=0.01)
    for step in range(4):
        loss = parallel(replayed())
        loss.backward()
        torch.nn.utils.clip_grad_value_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            target.load_state_dict(parallel.full_state_dict())
        yield loss


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actor, self.critic = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, state):
        hidden = self.body(state).tanh()
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(1)


def ppo(parallelize):
    """A clipped ratio of probabilities, a value loss and an entropy, four passes over one set of experiences."""

    def loss_fn(model, batch):
        state, action, before, advantage, gain = batch
        chosen, value = model(state)
        ratio = (chosen.log_prob(action) - before).exp()
        gained = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -gained.mean() + 0.5 * F.mse_loss(value, gain) - 0.01 * chosen.entropy().mean()

    batch = torch.randn(12, 6), torch.randint(0, 4, (12,)), -torch.rand(12), torch.randn(12), torch.randn(12)
    parallel = parallelize(ActorCritic(), loss_fn, batch)
    optimizer = torch.optim.Adam(parallel.parameters(), lr=0.01)
    for _ in range(4):
        loss = parallel(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def reinforce(parallelize):
    """Actions are drawn outside, from probabilities that `predict` gives; the baseline is the mean of the batch."""

    def loss_fn(model, batch):
        state, action, gain = batch
        scores = model(state).log_softmax(1)
        return -(scores.gather(1, action[:, None]).squeeze(1) * (gain - gain.mean())).mean(), scores

    state = torch.randn(12, 6)
    empty = torch.zeros(12, dtype=torch.long), torch.zeros(12)
    parallel = parallelize(policy(), loss_fn, (state, *empty))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
    for step in range(3):
        scores = parallel.predict((state, *empty))
        action = scores.exp().cumsum(1).lt((step + 1) / 4).sum(1).clamp(max=3)
        loss, _ = parallel((state, action, state.gather(1, action[:, None]).squeeze(1)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def triplets(parallelize):
    """Embeddings in which the partner is closer than the hardest other sample of the batch."""

    def loss_fn(model, batch):
        x, group = batch
        z = F.normalize(model(x), dim=1)
        apart = 2 - 2 * z @ z.T
        alike = group[:, None] == group[None, :]
        furthest = torch.where(alike, apart, -1.0).amax(1)
        nearest = torch.where(alike, 10.0, apart).amin(1)
        return (furthest - nearest + 0.2).relu().mean()

    batch = torch.randn(12, 6), torch.arange(12) // 3
    parallel = parallelize(policy(8), loss_fn, batch)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))


class Messages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, nodes, edges):
        for layer in (self.first, self.second):
            sent = layer(nodes)
            taken = torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]])
            nodes = (sent + taken).relu()
        return self.out(nodes)


def graph_network(parallelize):
    """Messages along the edges of a graph; labels of some nodes."""

    def loss_fn(model, batch):
        nodes, edges, label, known = batch
        each = F.cross_entropy(model(nodes, edges), label, reduction="none")
        return (each * known).sum() / known.sum()

    known = (torch.arange(12) % 3 == 0).to(torch.get_default_dtype())
    batch = torch.randn(12, 5), torch.randint(0, 12, (2, 12)), torch.randint(0, 2, (12,)), known
    parallel = parallelize(Messages(), loss_fn, batch, inputs="whole")
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))


class Table(nn.Module):
    """Columns of classes and of numbers, as in recommendation."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(20, 8), nn.EmbeddingBag(30, 8, mode="sum")
        self.net = nn.Sequential(nn.Linear(19, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user, items, numbers):
        return self.net(torch.cat([self.users(user), self.items(items), numbers], dim=1)).squeeze(1)


def recommendation(parallelize):
    """Users, bags of items and numbers; clicks."""

    def loss_fn(model, batch):
        *columns, click = batch
        return F.binary_cross_entropy_with_logits(model(*columns), click, pos_weight=torch.tensor(3.0))

    click = torch.randint(0, 2, (12,)).to(torch.get_default_dtype())
    batch = torch.randint(0, 20, (12,)), torch.randint(0, 30, (12, 4)), torch.randn(12, 3), click
    parallel = parallelize(Table(), loss_fn, batch)
    optimizer = torch.optim.Adagrad(parallel.parameters(), lr=0.05)
    yield from descend(parallel, optimizer, (batch for _ in range(3)))
