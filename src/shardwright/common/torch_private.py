"""Every use of a private torch API, each with the reason why no public one serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pkgutil import resolve_name
from traceback import FrameSummary
from typing import Any

import torch
import torch.distributed as dist
from torch._decomp import _should_decompose_because_unsafe_op
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import (
    _collect_all_valid_cia_ops_for_aten_namespace,
    _compiling_state_context,
    _is_cia_op,
    _special_op_to_preserve_cia,
)
from torch._higher_order_ops.effects import has_effects
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import distributed_c10d
from torch.export import ExportedProgram
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from torch.utils import _pytree  # torch has no public pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


@dataclass(frozen=True)
class Patch:
    """Names of a module or class of torch that stand for something else inside of `patched`."""

    owner: str
    names: tuple[str, ...]
    when: str
    why: str


# All that is patched in torch. Each lasts as long as the ``with`` in which it is made.
PATCHES: Mapping[str, Patch] = {
    "attributes": Patch(
        "torch.nn:Module", ("__getattribute__", "__setattr__"), "the loss function runs in a capture",
        "what a step reads and sets of its modules is noted; Python asks the class alone, and users' classes are many",
    ),
    "checkpoint": Patch(
        "torch.utils.checkpoint", ("CheckpointFunction", "_checkpoint_without_reentrant_generator"),
        "the loss function runs in a capture",
        "a graph recomputes nothing by itself; by whatever name checkpoint is called, it looks these up",
    ),
    "functions": Patch(
        "torch.autograd.function:_SingleLevelFunction", ("apply",), "the loss function runs in a capture",
        "each function with a backward of its own is one operator; all inherit this, also where apply was kept before",
    ),
    "batch norms": Patch(
        "torch.nn.modules.batchnorm:_BatchNorm", ("forward",), "the loss function runs in a capture",
        "without a momentum it reads the number of batches from a tensor, which has none there",
    ),
    "recurrent layers": Patch(
        "torch:_VF", ("lstm", "gru", "rnn_tanh", "rnn_relu"), "the loss function runs in a capture",
        "under autocast their kernels cast what they are given, which tensors without values do not show",
    ),
    "transforms": Patch(
        "torch._functorch.eager_transforms",
        ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"),
        "the loss function runs in a capture",
        "gradients of torch.func cannot be captured and are refused; by whatever name these are called, they look here",
    ),
    "seeds": Patch(
        "torch", ("manual_seed", "seed"), "the loss function runs in a capture",
        "a graph would not set the seed again; no mode of torch functions sees these",
    ),
    "sizes": Patch(
        "torch:SymInt", ("__repr__",), "a step is exported",
        "a text may decide something, too: asking for the number notes that, which the name of a symbol would not",
    ),
    "exporter": Patch(
        "torch.export._trace", ("print",), "a step is exported",
        "where an error speaks of data it prints the graph so far, which nothing turns off; the error is raised anyway",
    ),
    "stack traces": Patch(
        "torch.fx.config", ("do_not_emit_stack_traces",), "a step is exported",
        "the Python stack of every operator takes a good part of an export, and nobody reads it",
    ),
    "decompositions": Patch(
        "torch.export.exported_program", ("_split_decomp_table_to_cia_and_python_decomp",),
        "an exported program is made functional",
        "torch goes through the operators of all libraries, 0.1 s a call, several times the trace of a small model",
    ),
    "states of an LSTM": Patch(
        "torch._decomp.decompositions", ("one_layer_lstm",), "a recurrent layer is traced",
        "torch 2.11 and 2.12 give the last states a dim too many",
    ),
    "group names": Patch(
        "torch.distributed.distributed_c10d", ("_process_group_name",), "a group is made by its members alone",
        "torch's name has the number of groups of this process, by which members wait for each other for ever",
    ),
    "autocast": Patch(
        "torch.amp.autocast_mode:autocast", ("__init__",), "a plan for GPUs is made on a machine without one",
        "it turns itself off where there is no GPU; torch.cuda.amp.autocast and decorators inherit this",
    ),
    "zero_grad": Patch(
        "torch.optim:Optimizer", ("zero_grad",), "gradients of accumulate() are kept unreduced",
        "what a script drops must be dropped there, too; zero_grad has no hooks",
    ),
}  # fmt: skip


@contextmanager
def patched(what: str, **values: Any) -> Iterator[dict[str, Any]]:
    """Let names of `PATCHES` stand for these values, and give what they stood for, which they do again afterwards."""
    patch = PATCHES[what]
    assert set(values) <= set(patch.names), f"{what} does not say that it patches {set(values) - set(patch.names)}"
    owner = resolve_name(patch.owner)
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield before
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


_MISSING = object()


def add_gloo_inside(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Let gloo answer the calls from C++ that pass by ``group``, a subclass in Python; nothing public adds gloo."""
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def flight_recorder() -> bytes | str:
    """Return what torch has recorded of collectives, as JSON; its documented way is to write files."""
    c10d: Any = torch._C._distributed_c10d
    dump = getattr(c10d, "_dump_nccl_trace_json", None) or c10d._dump_fr_trace_json
    found: bytes | str = dump()
    return found


@contextmanager
def unbound() -> Iterator[None]:
    """Inside, groups are made as if the group of all ranks had no GPU of its own.

    torch splits the communicator of a new group off that of all ranks where these are bound to their GPUs. Every rank
    has to come to that, also one that is no member; but where the members have another backend, or make the group by
    themselves, some do not, and the others wait for ever. No argument of ``new_group`` says that nothing is to be
    split.
    """
    world = distributed_c10d._get_default_group()
    bound = world.bound_device_id
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


def new_group_of_members(ranks: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """A group that its members alone make, all of them together; None on other ranks.

    ``new_group`` names such a group after its ranks and the number of groups that the process has. That number differs
    between members, which then wait for each other for ever, and comes again when a group has ended, whose addresses
    then still stand in the store. Here it is the number of groups that this process has made of these ranks.
    """
    if dist.get_rank() not in ranks:
        return None
    key = "_".join(map(str, ranks))
    number = job_store().add(f"groups/{key}/made by {dist.get_rank()}", 1)
    name = distributed_c10d.GroupName(f"members {key} number {number}")
    device = distributed_c10d._get_default_group().bound_device_id
    with unbound(), patched("group names", _process_group_name=lambda *_, **__: name):
        group: dist.ProcessGroup = dist.new_group(
            list(ranks), timeout=timeout, use_local_synchronization=True, device_id=device
        )
    return group


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Let a GPU fail where ``condition`` is false, without waiting for it: torch's own check has no public name."""
    torch._assert_async(condition, text)


def backward_number() -> int:
    """Return the number of the backward that runs: hooks cannot tell a second one from a second loss of the same one.

    Torch's own hooks on several tensors ask the same.
    """
    number: int = torch._C._current_graph_task_id()
    return number


def after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs; not where that ends with an error."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def gradients_are_returned(leaf: torch.Tensor) -> bool:
    """Return whether `torch.autograd.grad` asked for the backward that runs, which then leaves nothing at ``leaf``.

    Torch tells it by an error, and only to who asks for a leaf.
    """
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return True
    return False


def fake_mode() -> FakeTensorMode:
    """Tensors without storage that keep their device: meta tensors lose it, and models ask for ``x.device``."""
    _know_gru_cells()
    return FakeTensorMode(allow_non_fake_inputs=True)


@lru_cache(maxsize=1)
def _know_gru_cells() -> torch.library.Library | None:
    """Let tensors without storage on a GPU pass a GRU, as they pass an LSTM: of this kernel torch knows no shapes.

    Cached so that it is done once, and what it registers lives on.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_thnn_fused_gru_cell", "Meta"):
        return None

    def cell(input_gates: torch.Tensor, hidden_gates: torch.Tensor, hidden: torch.Tensor, *_: Any) -> Any:
        return torch.empty_like(hidden), hidden.new_empty(hidden.shape[0], 5 * hidden.shape[1])  # and its workspace

    library = torch.library.Library("aten", "IMPL", "Meta")  # type: ignore[no-untyped-call]
    library.impl("_thnn_fused_gru_cell", cell)  # type: ignore[no-untyped-call]
    return library


def empty_like_on(tensor: torch.Tensor, device: torch.device, mode: FakeTensorMode) -> torch.Tensor:
    """A tensor without storage of the same shape, strides and dtype as ``tensor`` (real, fake or meta)."""
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _unwrapped(tensor: Any) -> Any:
    """Return what transforms of ``torch.func`` have wrapped."""
    while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one without storage."""
    return isinstance(_unwrapped(tensor), FakeTensor)


def mode_of(fake: torch.Tensor) -> FakeTensorMode:
    """Return the mode that a tensor without storage was made under."""
    assert isinstance(fake, FakeTensor)
    return fake.fake_mode


def has_no_value(tensor: Any) -> bool:
    """Return whether a tensor is one without storage whose value is not known as a constant either."""
    tensor = _unwrapped(tensor)
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def constant_of(tensor: Any) -> torch.Tensor | None:
    """Return the numbers of a tensor without storage where they are known as a constant."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def is_transformed(tensor: Any) -> bool:
    """Check whether a tensor stands for others inside of a transform of ``torch.func``."""
    return _unwrapped(tensor) is not tensor


def is_unknown(number: Any) -> bool:
    """Return whether a number of a trace depends on values of tensors, and not on sizes of the batch alone."""
    if isinstance(number, (int, float)):
        return False
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # imports sympy, half a second

    return has_free_unbacked_symbols(number)


def symbol_of(size: Any) -> Any:
    """A size of the batch as a program was traced with it: sympy's symbol for an open one, else the number."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def expression_of(size: torch.SymInt) -> Any:
    """A size as sympy's expression of open ones; torch itself gives the number that it had in the trace."""
    return size.node.expr


def note_further(size: torch.SymInt) -> None:
    """Let torch note what it decides by open sizes also after the export, when a program is made functional."""
    size.node.shape_env.frozen = False


def decided(size: torch.SymInt) -> Iterator[tuple[Any, FrameSummary | None]]:
    """Every condition on open sizes that was true in the trace of ``size``, and by which something was decided there.

    The exporter keeps them in an object without a public name, with the place in Python that asked, where it is known.
    """
    import sympy  # as above

    noted = size.node.shape_env
    for guard in noted.guards:
        frame = guard.sloc.framework_loc
        yield guard.expr, frame if isinstance(frame, FrameSummary) else None
    for symbol, same in noted.replacements.items():
        yield sympy.Eq(symbol, same), None
    for symbol, sizes in noted.var_to_range.items():
        yield symbol >= sizes.lower, None
        yield symbol <= sizes.upper, None
    for late in noted.deferred_runtime_asserts.values():
        yield from ((each.expr, None) for each in late)


def attention_backends() -> list[SDPBackend]:
    """The kernels of attention that are allowed now, the first ones first: public functions tell no order."""
    return list(_cur_sdpa_kernel_backends(with_priority=True))


# While `torch.compiler.is_exporting` and its like are true, as under the exporter: nothing public sets them.
exporting = _compiling_state_context


class OperatorMode(TorchDispatchMode):
    """Lets each operator be called by ``by(operator, args, kwargs)``, beneath autograd and autocast.

    The public `TorchFunctionMode` stands above these.
    """

    def __init__(self, by: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by = by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._by(func, args, kwargs or {})


def apply_function(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what ``MyFunction.apply(*args)`` does while that is patched."""
    return super(_SingleLevelFunction, function).apply(*args)


@contextmanager
def untraced() -> Iterator[None]:
    """Run operators that the exporter is not to see, nor any mode of torch functions: it has no public pause."""
    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing():
        yield


@contextmanager
def with_values() -> Iterator[None]:
    """Run operators in earnest while a step is traced: neither the exporter nor tensors without storage see them."""
    with torch._C.DisableTorchFunction(), disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.no_grad():
        yield


def traced(function: Callable[..., Any], *args: Any, above_autograd: bool) -> torch.fx.GraphModule:
    """The operators that ``function`` of tensors, or of lists of these, calls; what those call in turn is not recorded.

    Beneath autograd, these are the operators of every backward in it too, which the public exporter does not record.
    Libraries take the branches that they take under that.
    """

    def without_function_modes(*tensors: Any) -> Any:
        with torch._C.DisableTorchFunction(), torch.no_grad():  # the tracer's own mode would call itself without end
            return function(*tensors)

    run = without_function_modes if above_autograd else function
    with exporting():
        return make_fx(run, tracing_mode="real", pre_dispatch=above_autograd, _allow_non_fake_inputs=True)(*args)


pytree = _pytree  # torch has no public one; `trees` wraps it


def schema(operator: Any) -> Any:
    """Return the schema of an operator, to which no public name leads; `signatures` reads it."""
    return operator._schema


def run_decompositions(program: ExportedProgram, preserved: Iterable[Any]) -> ExportedProgram:
    """Return ``program`` without changes in place, every composite operator decomposed but ``preserved``.

    The table that `ExportedProgram.run_decompositions` takes names what is to be decomposed, and torch goes through the
    operators of all libraries for the others: 0.1 s a call, several times the trace of a small model. Operators that
    nothing is said of are decomposed by their own kernels, to the same operators.
    """
    kept = dict.fromkeys(preserved, _special_op_to_preserve_cia)
    patch = patched("decompositions", _split_decomp_table_to_cia_and_python_decomp=lambda table: (kept, table))
    with patch, traceable_recurrent_layers():
        decomposed: ExportedProgram = program.run_decompositions({})
    return decomposed


@contextmanager
def decomposing(preserved: Iterable[Any], mode: FakeTensorMode) -> Iterator[Callable[..., torch.fx.Graph | None]]:
    """Within, functions of tensors are traced as `run_decompositions` traces programs, by the function that this gives.

    It is called with a function, tensors of ``mode`` like those that the function is to get, and of each of these
    whether it needs a gradient. It returns a graph, or None where one of them is changed. The exporter has nothing
    public for less than a program.
    """

    def graph_of(function: Callable[..., Any], like: Iterable[Any], needing: Iterable[bool]) -> torch.fx.Graph | None:
        changed: list[bool] = []

        def run(*given: Any) -> Any:
            result = function(*given)
            changed.extend(map(_is_changed, given))
            return result

        given = [_without_value(tensor).requires_grad_(needs) for tensor, needs in zip(like, needing, strict=True)]
        functional = FunctionalTensorMode(export=True, _allow_token_discovery=True)
        with functional:
            graph = make_fx(dispatch_functionalize(run, functional))(*given).graph
        return None if any(changed) else graph

    from torch.export._trace import _ignore_backend_decomps  # which imports dynamo: seconds, for captures alone

    with (
        mode,
        _override_composite_implicit_decomp(dict.fromkeys(preserved, _special_op_to_preserve_cia)),
        _ignore_backend_decomps(),
        traceable_recurrent_layers(),
        _compiling_state_context(),
        torch.no_grad(),
        enable_python_dispatcher(),
    ):
        yield graph_of


def _without_value(fake: Any) -> Any:
    """Return another tensor that is like one without storage, and not known as a constant."""
    made = fake.detach()
    made.constant = None
    return made


def _is_changed(tensor: Any) -> bool:
    """Return whether a tensor that torch makes functional was changed, or turned into another view."""
    wrapped = tensor.elem
    if torch._functionalize_has_data_mutation(wrapped):  # type: ignore[attr-defined]
        return True
    return bool(torch._functionalize_has_metadata_mutation(wrapped))


# Within, torch writes Python code of most graphs when somebody asks for it, and not after each change: nothing public
# says so, and hardly any of the code that an export writes, for a twentieth of its time, is run.
code_when_asked = partial(_use_lazy_graph_module, True)


@contextmanager
def traceable_recurrent_layers() -> Iterator[None]:
    """Within, recurrent layers are traced: without cuDNN, which reads addresses that fake tensors lack."""

    def one_layer(x: Any, hidden: Any, *others: Any, **named: Any) -> Any:
        result, states = before["one_layer_lstm"](x, hidden, *others, **named)
        return result, tuple(state.reshape(first.shape) for state, first in zip(states, hidden, strict=True))

    enabled = torch._C._get_cudnn_enabled()
    torch._C._set_cudnn_enabled(False)
    try:
        with patched("states of an LSTM", one_layer_lstm=one_layer) as before:
            yield
    finally:
        torch._C._set_cudnn_enabled(enabled)


# The composite operators of ATen that `run_decompositions` can preserve, as a set.
preservable_operators = _collect_all_valid_cia_ops_for_aten_namespace


def is_composite(operator: Any) -> bool:
    """Return whether torch computes an operator by others, forward and backward: only its kernels tell."""
    return bool(_is_cia_op(operator))


def is_certain(operator: Any) -> bool:
    """Return whether the schema of an operator tells all that it does.

    It has no effect beside its results, and is none of those whose schema hides what they change or share.
    """
    return not _should_decompose_because_unsafe_op(operator) and not has_effects(operator)


def job_store() -> Any:
    """Return the store of the default process group, if any: it has no public name, and another needs a port."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return distributed_c10d._get_default_store()


def members(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Module | None], dict[str, torch.nn.Parameter | None]]:
    """Return the dictionaries in which a module keeps its children and its parameters.

    Hundreds of names are looked up in them before every step, which takes milliseconds by public names.
    """
    return module._modules, module._parameters


def hooks_of(module: torch.nn.Module) -> dict[str, dict[int, Callable[..., Any]]]:
    """The dictionaries in which a module keeps hooks that take part in a step, by what these are called."""
    return {
        "forward hooks": module._forward_hooks,
        "forward pre-hooks": module._forward_pre_hooks,
        "backward hooks": module._backward_hooks,
        "backward pre-hooks": module._backward_pre_hooks,
    }


def buffers_in(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The dictionary in which a module keeps its buffers, for the same reason."""
    return module._buffers


def version(tensor: torch.Tensor) -> int:
    """Return how often ``tensor`` was changed in place: the counter has no public name."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which ``tensor`` is a view, else itself; while a step is traced no memory tells that."""
    return tensor if tensor._base is None else tensor._base


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that look into the same memory, of which those without storage have no address."""
    return int(storage_of(tensor)._cdata)


def storage_of(tensor: torch.Tensor) -> Any:
    """The memory into which ``tensor`` looks; of one that a transform of ``torch.func`` wraps, that of the whole."""
    return _unwrapped(tensor).untyped_storage()


def dcp_storage_info(file: str, start: int, length: int) -> Any:
    """Return where a container lies, as ``torch.distributed.checkpoint`` looks it up: its class is private."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # half a second, and needed by saves alone

    return _StorageInfo(file, start, length)


# What `F.grouped_mm` calls, and by that a mode for functions sees it.
grouped_mm = torch._grouped_mm


def has_hook(parameter: torch.Tensor) -> bool:
    """Return whether a function is to be given the gradient of a parameter: only private attributes tell."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether a module normalises by statistics of its batch: the class of all of these has no public name."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def code_from_cache() -> tuple[int, int]:
    """Return how many parts of programs torch's compiler has found in its cache on disk, and how many it has made.

    What a compilation tells of itself has no public name.
    """
    from torch._dynamo.utils import counters  # seconds, and needed where something is compiled alone

    found, made = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    return found + counters["aot_autograd"]["autograd_cache_hit"], made


def compiled_code_directory() -> str:
    """Return where torch keeps what it has compiled, which no public name tells."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


def holders_of_memory(tensor: torch.Tensor) -> int:
    """Return how many tensors, and others in C++, have the memory of a tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


# What a class of DTensors has in place of ``__torch_function__`` that sees operators by ``__torch_dispatch__`` alone:
# torch's own way would make its results of that class by a method that DTensors do not have.
no_torch_function = torch._C._disabled_torch_function_impl


def let_optimizers_take_lists(kind: type[torch.Tensor]) -> None:
    """Let torch's optimizers and `clip_grad_norm_` use foreach kernels for a class; nothing public registers one."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    optimizer._foreach_supported_types.append(kind)
    _foreach_utils._foreach_supported_types.append(kind)


def dtensor_of(tensor: Any, kind: Any = None) -> Any:
    """Return a DTensor as one of class ``kind``, by default torch's own; public constructors make their class alone."""
    from torch.distributed.tensor import DTensor  # as above

    return (kind or DTensor)(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)


def dtensor_like(tensor: Any, part: torch.Tensor) -> Any:
    """Return a DTensor of the class, shape and layout of ``tensor`` that has ``part``.

    The public constructors take ten times as long, and there are hundreds of gradients and states in a step.
    """
    spec = copy(tensor._spec)
    if part.dtype != tensor.dtype:
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return type(tensor)(part, spec, requires_grad=False)


def keep_layout(tensor: Any, changed: Any) -> None:
    """Let a DTensor have the part and the layout of one that stood for it, which an operator has changed."""
    tensor._spec, tensor._local_tensor = changed._spec, changed._local_tensor


def part_of(tensor: Any) -> torch.Tensor:
    """Return the very tensor that this rank holds of a DTensor: ``to_local`` makes another where gradients are on."""
    part = tensor._local_tensor
    found: torch.Tensor = part.trigger_wait() if hasattr(part, "trigger_wait") else part  # it may be on its way here
    return found


def put_part(tensor: Any, part: torch.Tensor) -> None:
    """Let a DTensor be one of which this rank holds ``part``, as nothing public does to one that others know."""
    tensor._local_tensor = part


def acts_on_loads(module: torch.nn.Module) -> bool:
    """Return whether a module or one in it does more at `load_state_dict` than take tensors.

    No public name tells of hooks, nor of the method by which a class takes what is its own, which torch's documentation
    lets users override.
    """
    return any(
        each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        or not type(each)._load_from_state_dict.__module__.startswith("torch.")
        for each in module.modules()
    )
