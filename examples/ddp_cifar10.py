"""ResNet-18 on CIFAR-10 by torch's DistributedDataParallel: a script written for torchrun, without Shardwright.

torchrun --nproc-per-node 2 examples/ddp_cifar10.py --data DIR
shardwright launch -n 2 examples/ddp_cifar10.py --data DIR
"""

import argparse
import os
import pickle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MEAN, DEVIATION = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def resnet18(width):
    channels = [width, width, 2 * width, 4 * width, 8 * width]
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    for stage in range(4):
        layers.append(Block(channels[stage], channels[stage + 1], 1 if stage == 0 else 2))
        layers.append(Block(channels[stage + 1], channels[stage + 1], 1))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def cifar10(root):
    images, labels = [], []
    for number in range(1, 6):
        with open(Path(root) / "cifar-10-batches-py" / f"data_batch_{number}", "rb") as file:
            batch = pickle.load(file, encoding="bytes")
        images.append(batch[b"data"])
        labels += batch[b"labels"]
    pixels = torch.from_numpy(np.concatenate(images)).reshape(-1, 3, 32, 32) / 255
    return TensorDataset((pixels - MEAN[:, None, None]) / DEVIATION[:, None, None], torch.tensor(labels))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, help="of each epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

    torch.manual_seed(0)
    model = DistributedDataParallel(resnet18(args.width).to(device))
    dataset = cifar10(args.data)
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(loader):
            if step == args.steps:
                break
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
            torch.save(model.module.state_dict(), args.out / f"epoch_{epoch}.pth")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
