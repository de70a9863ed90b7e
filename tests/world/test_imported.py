"""What a rank imports until it trains: what others need would take time and memory on each of them."""

import subprocess
import sys

import pytest

STEP = """
import sys, torch, shardwright as sw

sw.init()
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "shardwright.run") if name in sys.modules])
model = torch.nn.Linear(3, 2)
parallel = sw.parallelize(model, lambda model, x: model(x).sum(), torch.ones(2, 3), batch="global")
parallel(torch.ones(2, 3)).backward()
parallel(torch.ones(2, 3)).backward()
print([name for name in ("networkx", "shardwright.checkpoint") if name in sys.modules])
from torch._functorch._activation_checkpointing import graph_info_provider
print(graph_info_provider.nx.DiGraph([(1, 2)]))
"""


@pytest.mark.slow
def test_a_rank_imports_what_it_needs():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "[]", "DiGraph with 2 nodes and 1 edges"], done.stderr
