"""The quick start loses what MindSpore loses, on any number of ranks and in every mode, and dumps what it runs."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks import run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.py"
REFERENCE = ROOT / "tests" / "reference"
LOSSES = json.loads((REFERENCE / "quickstart.json").read_text())
SUMMED = LOSSES["losses_batch_16_gradients_summed_over_8_ranks_of_2"]


def run_example(*arguments):
    """The losses that this rank prints, which are those of float32 to the last bit."""
    torch.set_num_threads(1)
    sys.argv = ["quickstart.py", "--weights", str(REFERENCE), *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return losses_in(output.getvalue())


def losses_in(text):
    lines = re.findall(r"epoch: (\d) step: (\d), loss is (\S+)", text)
    assert [(epoch, step) for epoch, step, _ in lines] == [(f"{e}", f"{s}") for e in range(1, 6) for s in range(1, 5)]
    return [float(loss) for *_, loss in lines]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "gradients", "tolerance"), [("auto", "mean", 1e-5), ("semi-auto", "mean", 1e-5), ("data", "sum", 2e-5)]
)
def test_eight_ranks_lose_as_the_reference(mode, gradients, tolerance):
    expected = LOSSES["losses_batch_16"] if gradients == "mean" else SUMMED
    for losses in run_ranks(8, run_example, "--mode", mode, "--gradients", gradients):  # the batch is 2 rows per rank
        assert losses == pytest.approx(expected, rel=0, abs=tolerance)


def test_fewer_ranks_lose_as_the_reference():
    for losses in run_ranks(2, run_example, "--batch", "2"):
        assert losses == pytest.approx(LOSSES["losses_batch_2"], rel=0, abs=1e-5)


def test_launched_it_prints_on_every_rank_saves_a_checkpoint_for_each_and_dumps_what_each_runs(tmp_path):
    command = [Path(sys.executable).parent / "shardwright", "launch", "-n", "2", "--save-graphs", "graphs:1", EXAMPLE]
    arguments = ["--weights", REFERENCE, "--batch", "16", "--checkpoint-dir", "checkpoints"]
    done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        [output] = tmp_path.glob(f"log_output/*/rank.{rank}/stdout*")
        assert losses_in(output.read_text()) == pytest.approx(LOSSES["losses_batch_16"], rel=0, abs=1e-5)
        assert os.listdir(tmp_path / "graphs" / f"rank_{rank}") == ["step_parallel_begin.ir"]
        state = torch.load(tmp_path / "checkpoints" / f"rank_{rank}" / "quickstart.pt")
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {"w": (32, 16), "w2": (16, 16)}
    one = torch.load(tmp_path / "checkpoints" / "rank_0" / "quickstart.pt")
    assert all(torch.equal(tensor, state[name]) for name, tensor in one.items())


def train_with_more_pins(directory):
    """The reference's losses with the relu and the second product pinned too, as MindSpore 2.0 documents its choice."""
    import shardwright as sw

    torch.set_num_threads(1)
    example = runpy.run_path(str(EXAMPLE))
    world = sw.init()
    model = example["Net"](world.size)
    model.relu = sw.shard(torch.relu, ((2, 4),))
    model.matmul2 = sw.shard(torch.matmul, ((2, 4), (4, 1)))
    batch = example["load"](str(REFERENCE), model, 16)
    parallel = sw.parallelize(model, example["loss_fn"], batch, "semi-auto", batch="global", save_graphs=directory)
    parallel.eval()(batch)  # another program, whose dumps stand beside the first's
    return parallel.train()(batch).item()


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("graphs")
    assert run_ranks(8, train_with_more_pins, str(directory)) == pytest.approx([LOSSES["losses_batch_16"][0]] * 8)
    return directory


def test_the_dump_shows_every_operators_strategy(dumps):
    text = (dumps / "rank_0" / "step_parallel_begin.ir").read_text()
    assert text.startswith(
        "# semi-auto, search propagation, mesh dp=2 tp.0=2 tp.1=2, 8 devices\n%0(w) = parameter float32[32, 16]"
    )
    lines = {re.search(r"instance name: (\w+)", line)[1]: line for line in text.splitlines() if "instance" in line}
    product = "in_strategy: ((2, 4), (4, 1))} {out_strategy: ((2, 1),)} {out: float32[16, 16]}"
    assert f"%4(matmul) = matmul(%2, %0) {{instance name: matmul}} {{{product}" in lines["matmul"]
    assert "{in_strategy: ((2, 4),)} {out_strategy: ((2, 4),)}" in lines["relu"]
    assert product in lines["matmul_1"]
    for name in ("matmul", "relu", "matmul_1"):
        assert "{pinned}" in lines[name]
        assert re.search(r"# scope: \(Default\) quickstart.py:\d+ in forward: return self.matmul2\(", lines[name])
    assert "{partial over ranks: (0, 1, 2, 3)}" in lines["matmul"]
    others = (dumps / "rank_6" / "step_parallel_begin.ir").read_text()
    assert others == text.replace("(0, 1, 2, 3)}", "(4, 5, 6, 7)}")


@pytest.mark.parametrize(("rank", "group", "column"), [(0, (0, 1, 2, 3), (0, 4)), (6, (4, 5, 6, 7), (2, 6))])
def test_the_dump_shows_what_a_rank_runs_and_with_whom_it_talks(dumps, rank, group, column):
    lines = (dumps / f"rank_{rank}" / "execute.ir").read_text().splitlines()
    assert lines[0].startswith(f"# rank {rank} of 8, at dp={rank // 4} ")
    assert "%w: float32[8, 16] = parameter w  # [32, 16] as [tp.0·tp.1, -]" in lines
    assert "%batch_0: float32[2, 32] = input 0  # [16, 32] as [dp·tp.0·tp.1, -]" in lines
    at = next(i for i, line in enumerate(lines) if line.startswith("%matmul_v1"))
    assert lines[at - 1].startswith("%matmul: float32[8, 16] = aten.matmul.default(%batch_0_v1, %w_v1)  # scope: ")
    assert lines[at].startswith("%matmul_v1: float32[8, 4] = reduce_scatter(%matmul)  # [dp, -] Σ")
    assert lines[at + 1 : at + 4] == [
        f"    # forward: reduce_scatter over ranks {group} of 512 bytes, each sends 384",
        f"    #   equivalent to all_reduce over ranks {group} of 512 bytes, each sends 768, and a slice of dim 1",
        f"    # adjoint: all_gather over ranks {group} of 512 bytes, each sends 384",
    ]
    assert lines[at + 4].startswith("%relu: float32[8, 4] = aten.relu.default(%matmul_v1)  # scope: (Default)")
    at = next(i for i, line in enumerate(lines) if line.startswith("%w_v1"))
    assert lines[at + 1] == f"    # adjoint: all_reduce over ranks {column} of 512 bytes, each sends 512"
    assert "    # one bucket: these 2 adjoints run as one all_reduce" in lines
    assert lines[-3].startswith("return %")


def test_the_program_is_dumped_as_the_python_that_runs(dumps):
    source = (dumps / "rank_0" / "program.py").read_text()
    compile(source, "program.py", "exec")
    assert "matmul_v1 = reduce_scatter(matmul, comm, dim=1, axes=('tp.0', 'tp.1'), size=16)" in source
