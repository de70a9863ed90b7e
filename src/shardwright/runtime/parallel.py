"""`parallelize`: a model and its loss, trained on all ranks as if on one."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from shardwright.common.torch_private import is_batch_norm
from shardwright.compiler.capture.step import outputs_alone
from shardwright.compiler.capture.tracing.outside.closures import called_function, code_digest
from shardwright.compiler.capture.tracing.refusals import ChangesParameterError
from shardwright.compiler.capture.tracing.trace import LossFunction
from shardwright.compiler.mesh.mesh import SEARCHED_STAGES, Mesh
from shardwright.compiler.plan.plan import Plan
from shardwright.compiler.plan.pricing.hardware import Hardware, read_hardware
from shardwright.compiler.plan.pricing.memory import ADAMW, OptimizerStates, states_of
from shardwright.compiler.plan.pricing.reserve import AUTO
from shardwright.compiler.plan.request import Inputs, PlanRequest, inputs_problem, read_memory, read_patterns
from shardwright.compiler.plan.searches import MODES, SEARCHES, MindSporeMode, Mode, SearchName, mode_called
from shardwright.compiler.rules.register import registered_rules
from shardwright.distributed.agreement import agree
from shardwright.distributed.precision import Precision, precision_problem, within
from shardwright.distributed.world import current_world
from shardwright.errors import CaptureError, UsageError
from shardwright.launch.options.save_graphs import SaveGraphs
from shardwright.runtime.captured import Options, Parallel
from shardwright.runtime.checks.check import Checks, checks_problem
from shardwright.runtime.compiled.needs import Compile, compile_problem, is_to_compile
from shardwright.runtime.eager_parallel import parallelize_eagerly
from shardwright.runtime.graphs.captures import Captures
from shardwright.runtime.graphs.dynamic import Dynamic, dynamic_problem, labels_and_shapes
from shardwright.runtime.limits import automatic_limit, memory_problem
from shardwright.runtime.model import ParallelModel
from shardwright.runtime.placing.initialising import Init, init_problem
from shardwright.runtime.programs.batches import problem_with_sample
from shardwright.runtime.programs.inputs import BatchKind, mesh_for
from shardwright.runtime.programs.planner import Planner, hardware_of

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|cuda:\d+")  # differs between ranks that mean the same
Gradients = Literal["mean", "sum"]


class EagerFallback(UserWarning):
    """The model could not be captured and runs by torch's DistributedDataParallel."""


def parallelize(
    model: nn.Module,
    loss_fn: LossFunction,
    sample_batch: Any,
    mode: Mode | MindSporeMode = "auto",
    *,
    search: SearchName | None = None,
    mesh: Mesh | str | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    plan: Plan | str | None = None,
    pins: Mapping[str, Any] | None = None,
    gradients: Gradients = "mean",
    batch_norm: Literal["global", "per-replica"] = "global",
    batch: BatchKind | None = None,
    dynamic: Dynamic = False,
    inputs: Inputs = "split",
    predict_fn: LossFunction | None = None,
    hardware: Hardware | str | PathLike[str] | None = None,
    memory: int | str | None = None,
    optimizer: OptimizerStates | Optimizer | type[Optimizer] | str = ADAMW,
    recompute: str | Sequence[str] = (),
    save_graphs: str | PathLike[str] | tuple[str | PathLike[str], int] | None = None,
    init: Init | None = None,
    compile: Compile = False,
    checks: Checks = "usual",
    precision: Precision | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> ParallelModel:
    """Train ``model`` on all ranks as on one; every rank calls this with the same model and arguments.

    Args:
        model: brought to this rank's device, tensor by tensor, of which only what the plan stores here stays; all
            ranks get rank 0's parameters and buffers. Its parameters become DTensors where the plan splits some of
            them, and stay plain tensors where it splits none. What is on the meta device is given values by ``init``.
        loss_fn: ``loss_fn(model, batch) -> loss`` or ``(loss, aux)``; the loss is a scalar of any form.
        sample_batch: one global batch, or a batch as ``parallel`` will get them.
        mode: "single" splits nothing; "data" splits the batch; "semi-auto" propagates what `sw.shard` and ``pins``
            demand; "auto" decides everything that is not pinned. MindSpore's "stand_alone", "data_parallel",
            "semi_auto_parallel" and "auto_parallel" are these four.
        search: "propagation" (fewest bytes; the usual one of semi-auto), "exact" (least seconds; of auto) or
            "recursive" (few seconds, axis by axis); "sharding_propagation", "dynamic_programming" and
            "recursive_programming" are MindSpore's names of these three.
        mesh: named axes, ``"dp=2,tp=4"``; by default one axis over all ranks, divided as the search needs it.
            An axis ``pp`` in front is that of pipeline stages, as in ``"pp=2,dp=4"``: each group of ranks computes a
            stretch of the operators. ``"pp=auto"``: as many stages as make a step quickest, or none.
        microbatches: into how many parts each rank's batch is cut, of which one goes through the stages behind the
            other; by default four for each stage, if there are as many rows.
        schedule: in which order they do: "1f1b", the usual one, in which a group of ranks holds as many as there are
            stages from it on; "gpipe", which goes with any loss, and holds all; "interleaved", or "interleaved:4":
            each group has 2, or 4, shorter stages; "zb-h1": gradients of weights are left for when a stage would wait.
        plan: a plan, or the path of a saved one, in place of a search.
        pins: strategies by pattern of module path, ``{"layers.*.up": ((2, 1), (1, 4))}``.
        gradients: "mean" leaves the gradient of the loss, "sum" that times the world size, in every mode.
        batch_norm: statistics over the global batch, or over each rank's part of it, as torch's DDP has them.
        batch: who cuts batches that do not come from ``sw.loader``, whose own know their place: with "local" each
            rank passes its part, of any size; with "global" all pass the same whole batch.
        dynamic: the dims of the batch whose sizes change from step to step, by tensor of the batch, as
            ``{"ids": 1, "mask": (0, 1)}``, or True for all that turn out to change. The graphs of other sizes then
            follow from one capture, where the same operators run for them; else each is captured.
        inputs: how batches come: each rank its rows ("split"), everything everywhere ("whole"), or slices per dim by
            name of the input.
        predict_fn: ``predict_fn(model, batch) -> outputs``, what ``parallel.predict(batch)`` gives, also for batches of
            another structure, as without labels; by default what the loss function returns beside the loss.
        hardware: what plans are priced by: the name of a shipped profile ("h100"), the path of one that
            ``shardwright bench --save-profile`` wrote, or its value; read on rank 0 alone, which plans for all. By
            default the shipped profile of the device.
        memory: how many bytes each device may hold, as "80GiB": the plan is the cheapest one found that keeps within,
            with parameters, gradients, the optimizer's states and what the backward needs counted. "auto" is what a GPU
            has but for a reserve, which is printed: for CUDA's context, NCCL, workspaces and fragmentation.
        optimizer: what will update the parameters, for the states that it keeps: a name as "adamw", a class of
            torch.optim, or an optimizer with its settings.
        recompute: patterns of module paths, as "blocks.*": the backward computes these modules again, in place of
            keeping what lies inside, with the same numbers. With ``memory`` plans decide it for the model's layers.
        save_graphs: a folder for dumps, or (folder, level): level 1 the strategies of all operators, level 2, the
            default, the program of each rank too. Without it, what ``shardwright launch --save-graphs`` says.
        init: ``init(module)`` gives values to the parameters and buffers of one module that are on the meta device, in
            place, as for ``Module.apply``; by default ``module.reset_parameters()`` is called. It is called on rank 0,
            on its device, children first, with random numbers of ``torch.initial_seed()``: the values are those of
            ``model.to_empty(device=...)`` and ``model.apply(init)`` after `set_seed`, for any plan and number of ranks.
        compile: let torch.compile make code of the operators between collectives, with the same numbers as without up
            to rounding; a line says how long that took. It is done at the first step of each shape of a batch, and kept
            for later runs. "auto" does it on GPUs alone, and leaves models uncompiled that cannot be captured.
        checks: "usual" compares what ranks hold alike, whole batches that all pass, and which collectives they have
            begun, in the first steps and then in one of a hundred; "full" in each step, to find in development which
            step parts them.
        precision: what steps compute in, with the parameters as they are: "bf16" or "fp16" call ``loss_fn`` and
            ``predict_fn`` within autocast of the device, "float32" without any; by default as it is around the call.
            Losses in "fp16" need a scaler (``torch.amp.GradScaler``), which `Trainer` brings.
        reduce_dtype: the dtype in which gradients are summed over ranks, as ``torch.bfloat16``, which moves half the
            bytes of float32 and rounds more; by default the dtype of each parameter, also under autocast.

    What it returns uses process groups until its ``close()``, the end of a ``with sw.parallelize(...) as parallel:``,
    or that of the process; those that no other model and no DTensor uses end with that.

    A model that cannot be captured runs by torch's DistributedDataParallel in the modes "data" and "single", with an
    `EagerFallback` warning that says why; the other modes need the capture.

    Raises:
        UsageError: where an argument does not fit, or ranks disagree.
        CaptureError: where the model cannot be captured; names the line and the remedy.
        StrategyError, PlanError: where pins contradict the model or the mesh, or no plan exists.
    """
    world = current_world()
    dumps, known, limit, states = None, None, None, ADAMW
    called: Mode = "auto"
    patterns: tuple[str, ...] = ()
    problem = _problem(search, gradients, batch_norm, batch) or inputs_problem(inputs)
    problem = problem or dynamic_problem(dynamic, *labels_and_shapes(sample_batch))
    try:
        called = mode_called(mode)
        dumps = SaveGraphs.wanted(save_graphs, os.environ)
        known = read_hardware(hardware, world.backend) if hardware is not None and world.rank == 0 else None
        limit = read_memory(memory) if memory not in (None, AUTO) else None
        states, patterns = states_of(optimizer), read_patterns(recompute)
    except UsageError as error:
        problem = problem or str(error)
    problem = problem or problem_with_sample(sample_batch) or init_problem(init)
    problem = problem or memory_problem(memory, world.device)
    problem = problem or precision_problem(precision, reduce_dtype)
    problem = problem or compile_problem(compile, world.device.type) or checks_problem(checks)
    lazy = [name for name, p in model.named_parameters() if is_lazy(p)]
    if lazy:
        problem = problem or (
            f"{lazy[0]} is not initialised (lazy modules get their shapes from a batch); call the model once on a "
            "batch before sw.parallelize, under torch.no_grad()"
        )
    shapes = {n: f"{list(p.shape)} {p.dtype}" for n, p in model.named_parameters() if not is_lazy(p)}
    options = {
        "mode": called,
        "search": search,
        "mesh": str(mesh),
        "microbatches": str(microbatches),
        "schedule": str(schedule),
        "gradients": gradients,
        "batch": batch,
    }
    options |= {
        "dynamic": str(dynamic),
        "memory": AUTO if memory == AUTO else str(limit),
        "optimizer": str(states),
        "recompute": str(patterns),
    }
    options |= {"compile": str(compile), "checks": checks, "precision": precision, "reduce_dtype": str(reduce_dtype)}
    agree(
        "parallelize",
        {"the arguments": options, "the model's parameters": shapes}
        | {"the rules of sw.register_rule": registered_rules()}
        | _code_of(model, loss_fn, predict_fn),
        problem,
    )
    devices = mesh_for(mesh, world.size)
    priced = hardware_of(world, known)
    if memory == AUTO:
        limit = automatic_limit(world, priced)
    request = PlanRequest(
        devices,
        called,
        search,
        inputs,
        priced,
        memory=limit,
        optimizer=states,
        recompute=patterns,
        microbatches=microbatches,
        schedule=schedule,
        search_stages=mesh == SEARCHED_STAGES,
    )
    loss_fn = within(precision, world.device, loss_fn)
    predict_fn = predict_fn and within(precision, world.device, predict_fn)
    predict = predict_fn and outputs_alone(predict_fn)
    captures = Captures(model, loss_fn, pins or {}, batch_norm, predict, dynamic, world.device, reduce_dtype)
    planner = Planner(captures, request)
    compiles = is_to_compile(compile, world.device.type)
    options_of_run = Options(batch, gradients, dumps, init, compiles, checks)
    try:
        made = Parallel(planner, sample_batch, options_of_run, world, plan)
        made.precision = precision
        return made
    except CaptureError as error:
        needed = MODES[called].captured or limit is not None or patterns or compile is True or reduce_dtype
        if needed or (isinstance(error, ChangesParameterError) and world.size > 1):
            raise
        if batch_norm == "global" and _has_batch_norm(model):
            raise CaptureError(
                f"{error}\nOr give sw.parallelize batch_norm='per-replica': with statistics of each rank's part of the "
                "batch, the model runs by torch's DistributedDataParallel where its loss is a mean over samples."
            ) from error.__cause__
        if world.rank == 0:
            warnings.warn(
                EagerFallback(f"running by DistributedDataParallel, which takes the loss for a mean, since {error}"),
                stacklevel=2,
            )
        eager = parallelize_eagerly(model, loss_fn, sample_batch, called, gradients, batch, predict_fn, checks)
        eager.precision = precision
        return eager


def _problem(search: str | None, gradients: str, batch_norm: str, batch: str | None) -> str | None:
    for name, value, choices in (
        ("search", search, (None, *SEARCHES)),
        ("gradients", gradients, get_args(Gradients)),
        ("batch_norm", batch_norm, ("global", "per-replica")),
        ("batch", batch, (None, *get_args(BatchKind))),
    ):
        if value not in choices:
            return f"{name}={value!r} is unknown; choose one of {', '.join(map(repr, choices))}"
    return None


def _code_of(model: nn.Module, loss_fn: LossFunction, predict_fn: LossFunction | None) -> dict[str, Any]:
    """Return the code that must be the same on all ranks: modules, each in a line, and the functions that call them."""
    alike = {
        f"module {name}" if name else "the model": _ADDRESS.sub("", f"{type(module).__name__}({module.extra_repr()})")
        for name, module in model.named_modules()
    }
    for what, called in (("the loss function", loss_fn), ("predict_fn", predict_fn)):
        function = called_function(called) if called is not None else None
        alike[what] = f"{function.__qualname__}, code {code_digest(function.__code__)}" if function else repr(called)
    return {"the number of modules": len(alike)} | alike


def _has_batch_norm(model: nn.Module) -> bool:
    return any(map(is_batch_norm, model.modules()))
