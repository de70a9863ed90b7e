"""Ctrl-C while the ranks of a job save a checkpoint."""

import signal

import pytest

from saved import good_step, no_leftovers, save_step
from shardwright.checkpoint.storage.store import Store

SAVES = """
    import sys, threading
    from pathlib import Path
    import torch
    import shardwright as sw
    from shardwright.checkpoint.saving.save import TO_SAVE, save
    from shardwright.checkpoint.storage.files import LocalFiles
    from shardwright.checkpoint.storage.store import Store
    from shardwright.distributed.ranks import ProcessRanks

    class Held(LocalFiles):
        def held(self, *arguments):
            Path("held").write_text("here")
            threading.Event().wait()

    who, operation = int(sys.argv[1]), sys.argv[2]
    world = sw.init()
    files = Held()
    if world.rank == who:
        setattr(files, operation, files.held)
    for step, where in ((1, LocalFiles()), (2, files)):
        state = {("model", name): torch.full((8,), float(step)) for name in ("weight", "bias")}
        state["run", "step"] = step
        save(Store("runs", where), f"step-{step}", state, {"step": step}, {}, ProcessRanks(TO_SAVE, timeout_s=100))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("who", "operation"), [(0, "rename"), (1, "finish")], ids=["commits", "writes"])
def test_ctrl_c_amid_a_save_leaves_the_checkpoint_before_and_nothing_else(launching, who, operation):
    script = launching.write("saves.py", SAVES)
    launcher = launching.start("-n", "2", "--grace", "100", script, str(who), operation)
    launching.wait_for_file("held")
    launcher.send_signal(signal.SIGINT)
    ended = launching.finish(launcher, timeout_s=90)
    assert ended.code == 130, ended.stderr
    launching.assert_none_left()
    store = Store(launching.folder / "runs")
    assert good_step(store) == 1
    no_leftovers(store)
    save_step(store, 3)
    assert good_step(store) == 3
