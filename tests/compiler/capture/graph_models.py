"""Models whose graphs the tests of this folder take, each with its loss function and a batch, in float64."""

import torch
import torch.nn.functional as F
from torch import nn


class Perceptron(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 4)

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


class TwoProducts(nn.Module):
    def __init__(self, matmul=torch.matmul):
        super().__init__()
        self.first = nn.Parameter(torch.randn(32, 16))
        self.second = nn.Parameter(torch.randn(16, 16))
        self.matmul = matmul
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.matmul(self.relu(self.matmul(x, self.first)), self.second)


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class SmallResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.body = Residual(8)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.body(self.pool(F.relu(self.norm(self.stem(x)))))
        return self.head(torch.flatten(self.average(x), 1))


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=2)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Transformer(nn.Module):
    def __init__(self, dropout=0.1, layers=2):
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.positions = nn.Embedding(8, 16)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(16, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(10, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 7, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 3)

    def forward(self, ids):
        return self.head(self.lstm(self.tokens(ids))[0][:, -1])


class GroupedAttention(nn.Module):
    """Four heads of queries, two of keys and values, with a padding mask."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(16, 16, bias=False)
        self.kv = nn.Linear(16, 16, bias=False)
        self.norm = nn.RMSNorm(16)

    def forward(self, x, mask):
        batch, length, _ = x.shape
        q = self.q(self.norm(x)).view(batch, length, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, 2, 4).unbind(2)
        y = F.scaled_dot_product_attention(
            q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask[:, None, None, :], enable_gqa=True
        )
        return x + F.silu(y.transpose(1, 2).flatten(2))


def squares(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def classes(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


def language(model, batch):
    logits = model(batch["ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["next"].flatten(), ignore_index=0)
    return loss, {"logits": logits, "tokens": batch["ids"].numel()}


def masked_squares(model, batch):
    x, mask, y = batch
    error = (model(x, mask) - y).square() * mask[..., None]
    return error.sum() / mask.sum() + error.mean() + error.mean(dim=(0, 2)).max()


def cases():
    """Name -> model, loss function, batch."""
    generator = torch.Generator().manual_seed(0)

    def real(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def whole(high, *shape):
        return torch.randint(0, high, shape, generator=generator)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = {
            "perceptron": (Perceptron(), squares, (real(4, 8), real(4, 4))),
            "two products": (TwoProducts(), squares, (real(16, 32), real(16, 16))),
            "resnet": (SmallResNet(), classes, (real(4, 3, 32, 32), whole(5, 4))),
            "transformer": (Transformer(), language, {"ids": whole(32, 2, 8), "next": whole(32, 2, 8)}),
            "lstm": (Recurrent(), classes, (whole(10, 4, 5), whole(3, 4))),
            "grouped attention": (
                GroupedAttention(),
                masked_squares,
                (real(2, 6, 16), whole(4, 2, 6) > 0, real(2, 6, 16)),
            ),
        }
    return {name: (model.double(), loss, batch) for name, (model, loss, batch) in found.items()}
