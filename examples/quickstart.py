"""Two products learn a table of numbers, split over 8 processes as one pinned operator demands.

shardwright launch -n 8 examples/quickstart.py      (or torchrun, mpirun, plain python)
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import nn

import shardwright as sw
from shardwright.compiler.report.text import loss_line

EPOCHS, STEPS = 5, 4


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["single", "data", "semi-auto", "auto"], default="semi-auto")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="of the global batch; by default two for each rank")
    parser.add_argument("--gradients", choices=["mean", "sum"], default="mean")
    parser.add_argument("--weights", metavar="DIR", help="where w, w2, x and y are .npy files, instead of drawing them")
    parser.add_argument("--save-graphs", metavar="DIR", help="where to dump the plan and each rank's program")
    parser.add_argument(
        "--checkpoint-dir", metavar="DIR", help="where each rank writes rank_N/quickstart.pt at the end"
    )
    return parser.parse_args()


class Net(nn.Module):
    """(rows, 32) -> (rows, 16). The first product is cut into rows and columns: on 8 ranks ((2, 4), (4, 1))."""

    def __init__(self, ranks):
        super().__init__()
        rows = min(2, ranks)
        columns = ranks // rows
        self.w = nn.Parameter(0.02 * torch.randn(32, 16))
        self.w2 = nn.Parameter(0.02 * torch.randn(16, 16))
        self.matmul = sw.shard(torch.matmul, ((rows, columns), (columns, 1)))
        self.relu = torch.relu
        self.matmul2 = torch.matmul

    def forward(self, x):
        return self.matmul2(self.relu(self.matmul(x, self.w)), self.w2)


def loss_fn(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def load(directory, model, rows):
    """The batch, and the weights into the model, from files."""
    w, w2, x, y = (
        torch.from_numpy(np.load(Path(directory) / f"{name}.npy"))
        for name in ("w_std02", "w2_std02", f"x_b{rows}", f"y_b{rows}")
    )
    model.load_state_dict({"w": w, "w2": w2})
    return x, y


def main():
    args = parse_arguments()
    world = sw.init()
    sw.set_seed(1)
    model = Net(world.size)
    rows = args.batch or 2 * world.size
    batch = load(args.weights, model, rows) if args.weights else (torch.randn(rows, 32), torch.randn(rows, 16))
    parallel = sw.parallelize(
        model, loss_fn, batch, args.mode, batch="global", gradients=args.gradients, save_graphs=args.save_graphs
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.2, momentum=0.1)
    for epoch in range(1, EPOCHS + 1):
        for step in range(1, STEPS + 1):
            loss = parallel(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(loss_line(epoch, step, loss.item()), flush=True)
    if args.checkpoint_dir:
        folder = Path(args.checkpoint_dir) / f"rank_{world.rank}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(parallel.full_state_dict(), folder / "quickstart.pt")


if __name__ == "__main__":
    main()
