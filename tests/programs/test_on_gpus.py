"""The steps of whole programs on GPUs that are not there: nothing lies elsewhere, and nobody waits for the GPU.

What ranks move goes through a communicator that refuses tensors of another device, and sums that NCCL cannot make.
"""

import pytest
from test_programs import PROGRAMS

from ranks import run_ranks


def steps_on_gpus(name):
    """What would wait, or lie elsewhere than on the GPU, in the first steps of a program on two and four ranks."""
    import torch

    import shardwright as sw
    from gpu_like import LIKE_A_GPU, step_on_gpu
    from shardwright.compiler.capture.step import captured_step
    from shardwright.compiler.mesh.mesh import Mesh
    from shardwright.compiler.plan.make import make_plan
    from shardwright.compiler.plan.request import PlanRequest
    from shardwright.runtime.verification.plain import PlainModel

    torch.set_default_dtype(torch.float64)
    sw.set_seed(0)
    found = []

    def parallelize(model, loss_fn, batch, pins=None, **_):
        captured = captured_step(model, loss_fn, batch, pins or {})
        for ranks in (2, 4):
            plan = make_plan(captured, PlanRequest(Mesh.of(d=ranks), "auto", search="propagation"))
            values, waits = step_on_gpu(plan, ranks - 1)
            found.extend(waits)
            known = {label: value for label, value in captured.values.items() if label in values}
            found.extend(label for label in known if values[label].device != LIKE_A_GPU)
            found.extend(label for label, value in known.items() if values[label].dtype != value.dtype)
        return PlainModel(model, loss_fn)

    next(PROGRAMS[name](parallelize))
    return found


# Whose shapes without values torch does not know: what a CTC loss keeps depends on lengths.
UNKNOWN = {"lstm_ctc"}
NAMES = sorted({*PROGRAMS} - UNKNOWN)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_steps_of_a_program_run_on_gpus(name):
    assert run_ranks(1, steps_on_gpus, name, timeout=110) == [[]]
