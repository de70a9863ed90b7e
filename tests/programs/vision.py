"""Programs that learn from images."""

import copy

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import nn

from side_by_side import descend


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, 4), nn.BatchNorm2d(8)
        self.up, self.join, self.head = (
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.Conv2d(8, 4, 3, padding=1),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x):
        high = self.norm1(self.down1(x)).relu()
        low = self.norm2(self.down2(F.max_pool2d(high, 2))).relu()
        joined = torch.cat([self.up(low), high], dim=1)
        return self.head(self.join(joined).relu())


def segmentation(parallelize):
    """A U-Net on pixels, of which some are not counted; the soft Dice loss is over the whole batch."""

    def loss_fn(model, batch):
        image, mask = batch
        logits = model(image)
        share = logits.softmax(1)[:, 1]
        wanted = (mask == 1).to(share.dtype)
        dice = 1 - (2 * (share * wanted).sum() + 1) / (share.sum() + wanted.sum() + 1)
        return F.cross_entropy(logits, mask, ignore_index=255) + dice

    image, mask = torch.randn(6, 1, 8, 8), torch.randint(0, 2, (6, 8, 8))
    mask[:, 0] = 255
    parallel = parallelize(UNet(), loss_fn, (image, mask))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    yield from descend(parallel, optimizer, ((image, mask) for _ in range(3)))


class Classifier(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x):
        return self.head(self.body(x))


def mixup(parallelize):
    """Pairs of images are mixed before the step; two optimizer groups, cosine schedule, smoothed labels."""

    def loss_fn(model, batch):
        image, label, other, share = batch
        logits = model(image)
        return share * F.cross_entropy(logits, label, label_smoothing=0.1) + (1 - share) * F.cross_entropy(
            logits, other, label_smoothing=0.1
        )

    def mixed():
        share, order = torch.rand(()), torch.randperm(len(image))
        return share * image + (1 - share) * image[order], label, label[order], share

    image, label = torch.randn(9, 3, 6, 6), torch.randint(0, 5, (9,))
    parallel = parallelize(Classifier(), loss_fn, mixed())
    decayed = [p for p in parallel.parameters() if p.ndim > 1]
    others = [p for p in parallel.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(4):
        loss = parallel(mixed())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        yield loss


def simclr(parallelize):
    """Two views of each image against all others of the global batch."""

    def loss_fn(model, batch):
        z = F.normalize(model(torch.cat(batch)), dim=1)
        n = len(batch[0])
        alike = z @ z.T / 0.5
        alike = alike.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
        partner = torch.arange(2 * n, device=z.device).roll(n)
        return F.cross_entropy(alike, partner)

    first, second = torch.randn(6, 3, 6, 6), torch.randn(6, 3, 6, 6)
    parallel = parallelize(Classifier(8), loss_fn, (first, second))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1, momentum=0.9)
    yield from descend(parallel, optimizer, ((first, second) for _ in range(3)))


def byol(parallelize):
    """A teacher beside the model, which follows it; the loss function closes over it."""
    student = nn.ModuleDict(
        {"net": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "head": nn.Linear(4, 4)}
    )
    teacher = copy.deepcopy(student["net"]).requires_grad_(False)

    def loss_fn(model, batch):
        a, b = batch

        def apart(x, y):
            return 2 - 2 * F.cosine_similarity(model["head"](model["net"](x)), teacher(y).detach()).mean()

        return apart(a, b) + apart(b, a)

    views = torch.randn(10, 8), torch.randn(10, 8)
    parallel = parallelize(student, loss_fn, views)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for _ in range(4):
        loss = parallel(views)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, follower in teacher.named_parameters():
                leader = parallel.full_state_dict()[f"net.{name}"]
                follower.lerp_(leader, 0.1)
        yield loss


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 16))
        self.image = nn.Linear(8, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.classes, self.boxes = nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, image):
        memory = self.image(image)
        found, _ = self.attention(self.queries.expand(len(image), -1, -1), memory, memory, need_weights=False)
        return self.classes(found), self.boxes(found).sigmoid()


def set_prediction(parallelize):
    """As DETR: predictions are matched with what is there by an assignment outside of the graph, from `predict`."""

    def loss_fn(model, batch):
        image, label, box, order = batch
        logits, boxes = model(image)
        rows = torch.arange(len(image), device=image.device)[:, None]
        loss = F.cross_entropy(logits[rows, order].flatten(0, 1), label.flatten())
        return loss + F.l1_loss(boxes[rows, order], box), (logits, boxes)

    def matched(logits, boxes):
        cost = torch.cdist(boxes, box, p=1) - logits.softmax(-1).gather(2, label[:, None].expand(-1, 4, -1))
        return torch.tensor([linear_sum_assignment(c.T.numpy())[1].tolist() for c in cost])

    image, label, box = torch.randn(6, 5, 8), torch.randint(0, 3, (6, 2)), torch.rand(6, 2, 4)
    first = torch.tensor([[0, 1]]).expand(6, 2)
    parallel = parallelize(Detector(), loss_fn, (image, label, box, first))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    for _ in range(3):
        order = matched(*parallel.predict((image, label, box, first)))
        loss, _ = parallel((image, label, box, order))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.position = nn.Linear(6, 16), nn.Parameter(torch.randn(1, 8, 16) * 0.02)
        self.missing = nn.Parameter(torch.zeros(1, 1, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.Linear(16, 6)

    def forward(self, x, seen):
        tokens = self.patches(x) + self.position
        index = seen[:, :, None].expand(-1, -1, 16)
        encoded = self.encoder(tokens.gather(1, index))
        whole = self.missing.expand(len(x), 8, 16).scatter(1, index, encoded)
        return self.decoder(whole + self.position)


def masked_autoencoder(parallelize):
    """Only some patches are encoded, the others are predicted; which ones comes with the batch."""

    def loss_fn(model, batch):
        x, seen = batch
        hidden = torch.ones(x.shape[:2], device=x.device, dtype=x.dtype).scatter(1, seen, 0.0)
        wrong = (model(x, seen) - x).square().mean(-1)
        return (wrong * hidden).sum() / hidden.sum()

    x = torch.randn(6, 8, 6)

    def seen():
        return torch.rand(6, 8).argsort(1)[:, :3]

    parallel = parallelize(MaskedAutoencoder(), loss_fn, (x, seen()))
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.01)
    yield from descend(parallel, optimizer, ((x, seen()) for _ in range(3)))
