"""What a rank imports until it trains: what others need would take time and memory on each of them."""

import subprocess
import sys

STEP = """
import sys, torch, shardwright as sw

sw.init()
late = "torch._dynamo", "torch.distributed.tensor", "torch.export._trace", "shardwright.runtime"
print([name for name in late if name in sys.modules])
model = torch.nn.Linear(3, 2)
parallel = sw.parallelize(model, lambda model, x: model(x).sum(), torch.ones(2, 3), batch="global")
parallel(torch.ones(2, 3)).backward()
parallel(torch.ones(2, 3)).backward()
print("shardwright.checkpoint" in sys.modules)
"""


def test_a_rank_imports_what_it_needs():
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "False"], done.stderr
