"""A perceptron learns handwritten digits, on any number of processes as on one.

shardwright launch -n 8 examples/mnist_mlp.py --data digits      (or torchrun, mpirun, plain python)
"""

import argparse
import itertools

import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.compiler.report.text import loss_line


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, metavar="DIR", help="the folder of the MNIST files")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--steps", type=int, help="stop after so many steps, whatever the epochs")
    parser.add_argument("--batch-size", type=int, default=32, help="of the global batch, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--gradients", choices=["mean", "sum"], default="mean")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--checkpoint", metavar="PATH", help="where rank 0 writes the full state at the end")
    return parser.parse_args()


def logits(model, images):
    """The images come in [0, 1]; mean and deviation are those of MNIST."""
    return model((images.to(model[1].weight.dtype) - 0.1307) / 0.3081)


def loss_fn(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(logits(model, images), labels)


def count_right(model, loader, device):
    """How many test samples are right, each counted once whatever the number of ranks."""
    right = torch.zeros((), dtype=torch.int64, device=device)
    with torch.no_grad():
        for batch in loader:
            images, labels = batch.to(device)
            right += (logits(model, images).argmax(1) == labels).sum()
    dist.all_reduce(right)
    return right.item()


def main():
    args, world = parse_arguments(), sw.init()
    sw.set_seed(0)
    hidden = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(512, 10)).to(getattr(torch, args.dtype))
    train = sw.loader(sw.MNIST(args.data, train=True), batch_size=args.batch_size)
    test = sw.loader(sw.MNIST(args.data, train=False), batch_size=512, evaluate=True)
    parallel = sw.parallelize(model, loss_fn, train.sample_batch(), mode="data", gradients=args.gradients)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=args.lr, momentum=args.momentum)
    numbers = ((epoch, step) for epoch in range(1, args.epochs + 1) for step in range(1, len(train) + 1))
    batches = itertools.chain.from_iterable(itertools.repeat(train, args.epochs))
    for (epoch, step), batch in itertools.islice(zip(numbers, batches, strict=True), args.steps):
        loss = parallel(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0 and world.rank == 0:
            print(loss_line(epoch, step, loss.item()), flush=True)
    right = count_right(parallel.eval().module, test, world.device)
    if world.rank == 0:
        print(f"test accuracy: {100 * right / len(test.dataset):.2f} % ({right} of {len(test.dataset)})")
        if args.checkpoint:
            torch.save({"model": parallel.state_dict(), "optimizer": optimizer.state_dict()}, args.checkpoint)


if __name__ == "__main__":
    main()
