"""Every use of a private torch API, each with the reason why no public one serves."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from importlib import import_module
from threading import get_ident
from traceback import FrameSummary
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._decomp import _should_decompose_because_unsafe_op
from torch._export.utils import (
    _check_valid_to_preserve,
    _collect_all_valid_cia_ops_for_aten_namespace,
    _compiling_state_context,
    _get_decomp_for_cia,
    _is_cia_op,
    _special_op_to_preserve_cia,
)
from torch._functorch import eager_transforms
from torch._higher_order_ops.effects import has_effects
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.autograd.function import _SingleLevelFunction, once_differentiable
from torch.distributed import distributed_c10d
from torch.export import ExportedProgram, exported_program
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, make_fx
from torch.multiprocessing.reductions import StorageWeakRef  # in no page of torch's documentation
from torch.utils import _pytree as pytree  # torch has no public pytree
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "Computed",
    "DynamicOutputShapeException",
    "MemoryOf",
    "References",
    "acts_on_loads",
    "add_gloo_inside",
    "apply_function",
    "arguments_of",
    "assert_on_device",
    "backward_number",
    "base_of",
    "buffers_in",
    "call_checkpointed",
    "changes_of",
    "changes_operands",
    "checkpoints_call",
    "checks_itself",
    "code_from_cache",
    "compiled_code_directory",
    "computed",
    "constant_of",
    "copies_of",
    "copy_each",
    "dcp_storage_info",
    "decided",
    "empty_like_on",
    "exporting",
    "expression_of",
    "fake_mode",
    "flight_recorder",
    "functions_apply",
    "gradient_transforms_call",
    "gradients_are_returned",
    "grouped_mm",
    "has_no_value",
    "has_unknown_size",
    "higher_order_name",
    "holders_of_memory",
    "is_certain",
    "is_checkpoint",
    "is_composite",
    "is_fake",
    "is_operator",
    "is_pointwise",
    "is_transformed",
    "is_unknown",
    "job_store",
    "keeps_statistics",
    "local_part",
    "looking_into",
    "makes_new",
    "may_stay_whole",
    "members",
    "mode_of",
    "new_group_of_members",
    "note_further",
    "number_in_expressions",
    "on_cpu",
    "operators_are_watched",
    "operators_called",
    "overloads_of",
    "part_of",
    "parts_of",
    "preservable_operators",
    "put_part",
    "quiet_exporter",
    "random_state",
    "references_to",
    "replaced",
    "returns_list",
    "run_decompositions",
    "schema_parameters",
    "shared_operands",
    "sizes_written_as_numbers",
    "storage_key",
    "storage_of",
    "symbol_of",
    "tell_of_dropped_gradients",
    "tensors_returned",
    "tensors_taken",
    "trace_above_autograd",
    "trace_beneath_autograd",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "unbound",
    "untraced",
    "version",
    "views_into",
    "waited_for",
    "with_values",
    "without_defaults",
    "writes_out",
    "written_operands",
]


def add_gloo_inside(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Let gloo answer what ``group``, a subclass in Python, does not: calls from C++ pass by some methods of such a
    subclass, and adding a backend to a group has no public name."""
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)


def flight_recorder() -> bytes | str:
    """What torch has recorded of collectives, as JSON: its documented way is to write files when a job is given up."""
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


def new_group_of_members(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """A group that its members alone make, all of them together; None on other ranks.

    ``new_group`` names such a group after its ranks and the number of groups that the process has. That number differs
    between members, which then wait for each other for ever, and comes again when a group has ended, whose addresses
    then still stand in the store. Here it is the number of groups that this process has made of these ranks.
    """
    if dist.get_rank() not in ranks:
        return None
    key = "_".join(map(str, ranks))
    number = job_store().add(f"groups/{key}/made by {dist.get_rank()}", 1)
    before = distributed_c10d._process_group_name
    name = distributed_c10d.GroupName(f"members {key} number {number}")
    device = distributed_c10d._get_default_group().bound_device_id
    distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        with unbound():
            group: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, device_id=device)
        return group
    finally:
        distributed_c10d._process_group_name = before


def assert_on_device(condition: torch.Tensor, text: str) -> None:
    """Let a GPU fail where ``condition`` is false, when it comes to it: asking it would wait for all that it has to do,
    and what torch's own operators assert with has no public name."""
    torch._assert_async(condition, text)


def backward_number() -> int:
    """Which backward this process is in: hooks cannot tell a second one from a second loss of the same one, for which
    torch's own hooks on several tensors ask the same."""
    number: int = torch._C._current_graph_task_id()
    return number


def gradients_are_returned(leaf: torch.Tensor) -> bool:
    """Whether the backward that runs was asked for by `torch.autograd.grad`, which leaves nothing at ``leaf``: torch
    tells it by an error, and only to who asks for a leaf."""
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
    """What transforms of ``torch.func`` have wrapped."""
    while isinstance(tensor, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one without storage."""
    return isinstance(_unwrapped(tensor), FakeTensor)


def mode_of(fake: torch.Tensor) -> FakeTensorMode:
    """Return the mode that a tensor without storage was made under."""
    assert isinstance(fake, FakeTensor)
    return fake.fake_mode


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that has storage, brought to the CPU, whatever modes are on: under that of tensors without storage it
    would have none."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return tensor.cpu()


def has_no_value(tensor: Any) -> bool:
    """Whether a tensor is one without storage whose value is not known as a constant either."""
    tensor = _unwrapped(tensor)
    return isinstance(tensor, FakeTensor) and tensor.constant is None


def constant_of(tensor: Any) -> torch.Tensor | None:
    """Return the numbers of a tensor without storage where they are known as a constant."""
    return tensor.constant if isinstance(tensor, FakeTensor) else None


def is_transformed(tensor: Any) -> bool:
    """Check whether a tensor stands for others inside of a transform of ``torch.func``."""
    return _unwrapped(tensor) is not tensor


def has_unknown_size(tensor: torch.Tensor) -> bool:
    """Whether a size of a tensor without storage depends on values of tensors, and not on sizes of the batch alone."""
    sizes: tuple[Any, ...] = tuple(tensor.shape)
    return any(isinstance(size, torch.SymInt) and is_unknown(size) for size in sizes)


def is_unknown(number: Any) -> bool:
    """Whether a number of a trace depends on values of tensors, and not on sizes of the batch alone."""
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # imports sympy, half a second

    return has_free_unbacked_symbols(number)


def symbol_of(size: Any) -> Any:
    """A size of the batch as a program was traced with it: sympy's symbol for an open one, else the number."""
    return size.node._expr if isinstance(size, torch.SymInt) else size


def number_in_expressions(number: int) -> Any:
    """A number that can stand in place of a symbol."""
    import sympy  # a quarter of a second, and needed where sizes are open alone

    return sympy.Integer(number)


def expression_of(size: torch.SymInt) -> Any:
    """A size as sympy's expression of open ones; torch itself gives the number that it had in the trace."""
    return size.node.expr


def note_further(size: torch.SymInt) -> None:
    """Let torch note what it decides by open sizes also after the export, when a program is made functional."""
    size.node.shape_env.frozen = False


@contextmanager
def sizes_written_as_numbers(is_users: Callable[[str], bool]) -> Iterator[None]:
    """Let open sizes be the numbers of the trace where the user's files write them: a text can be decided by, too.

    Asking for the number notes the question, which the name of a symbol would not.
    """
    before: Callable[[torch.SymInt], str] = torch.SymInt.__repr__

    def written(size: torch.SymInt) -> str:
        return repr(int(size)) if is_users(sys._getframe(1).f_code.co_filename) else before(size)

    torch.SymInt.__repr__ = written  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymInt.__repr__ = before  # type: ignore[method-assign]


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


@cache
def _exporter() -> ModuleType:
    """Where the public exporter is written; its import takes a second, and most ranks export nothing.

    Cached once: a module is imported once.
    """
    return import_module("torch.export._trace")


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Without what the exporter tells about errors that are raised anyway: its loggers have private names, and where an
    error speaks of data it prints the graph that it has so far, which nothing turns off but a `print` of its own.

    Nor does it note the Python stack of every operator, which nobody reads and which takes a good part of its time.
    """
    loggers = [logging.getLogger(f"torch.{name}") for name in _TELLING]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    hiding = vars(_exporter())
    hiding["print"] = lambda *_, **__: None  # hides what is built in
    try:
        with replaced(torch.fx.config, {"do_not_emit_stack_traces": True}):
            yield
    finally:
        hiding.pop("print", None)
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


_TELLING = (
    "fx.experimental.symbolic_shapes", "fx.experimental.recording", "_subclasses.fake_tensor", "export._trace",
    "_export.non_strict_utils",
)  # fmt: skip


@contextmanager
def exporting() -> Iterator[None]:
    """While `torch.compiler.is_exporting` and its like are true, as under the exporter: nothing public sets them."""
    with _compiling_state_context():
        yield


def _is_tuple_subclass(tree: Any) -> bool:
    return (
        isinstance(tree, tuple)
        and type(tree) is not tuple
        and type(tree) not in pytree.SUPPORTED_NODES
        and not pytree.is_namedtuple_instance(tree)
    )


def _plain_tuples(tree: Any) -> Any:
    """The same tree with unregistered subclasses of tuple, which pytree takes for leaves, as plain tuples."""
    if _is_tuple_subclass(tree):
        return tuple(_plain_tuples(item) for item in tree)
    return pytree.tree_map(
        lambda leaf: _plain_tuples(leaf) if _is_tuple_subclass(leaf) else leaf, tree, is_leaf=_is_tuple_subclass
    )


def tree_flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Leaves with their paths (``0``, ``image``, ``1.mask``) and the spec; subclasses of tuple count as tuples."""
    leaves, spec = pytree.tree_flatten_with_path(_plain_tuples(tree))
    return [(".".join(_step(key) for key in path), leaf) for path, leaf in leaves], spec


def structure_of(spec: Any) -> tuple[Any, ...]:
    """Return what stands in the spec of a tree: the type of a node, its context, such as the keys of a dict, and the
    nodes in it. Torch 2.11 has another name for the last of these."""
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    return spec.type, spec.context, tuple(map(structure_of, children))


def keys_in(tree: Any) -> Iterator[Any]:
    """The keys of mappings on the ways to the leaves of a tree."""
    for path, _ in pytree.tree_flatten_with_path(_plain_tuples(tree))[0]:
        yield from (key.key for key in path if isinstance(key, pytree.MappingKey))


def _step(key: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with ``function`` of every leaf; subclasses of tuple become tuples."""
    return pytree.tree_map(function, _plain_tuples(tree))


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, without their paths."""
    return pytree.tree_leaves(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """The tree of which `tree_flatten` gave ``spec``."""
    return pytree.tree_unflatten(leaves, spec)


def higher_order_name(target: Any) -> str | None:
    """The name of a higher-order operator in an exported graph, which has no public type; None for other targets."""
    return str(target.__name__) if isinstance(target, HigherOrderOperator) else None


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # the public TorchFunctionMode stands above autocast and autograd
    def __init__(self, by: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._by = by

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._by(func, args, kwargs or {})


@contextmanager
def operators_called(by: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
    """Let each operator be called by ``by(operator, args, kwargs)``, beneath autograd and autocast."""
    with _Dispatched(by):
        yield


@dataclass(frozen=True)
class Computed:
    """What a call of operators did.

    ``casts``: to which dtype it cast each of some tensors, by position.
    ``made``: the operators that made new tensors of others, without overload, each with the dtypes of its results;
    without casts and copies.
    ``result``: what the call returned.
    """

    casts: dict[int, torch.dtype]
    made: list[tuple[str, tuple[torch.dtype, ...]]]
    result: Any


def computed(tensors: Sequence[torch.Tensor], call: Callable[[], Any]) -> Computed:
    """What ``call`` does beneath autograd and autocast, and how it casts ``tensors``, which are without storage."""
    casts: dict[int, torch.dtype] = {}
    made: list[tuple[str, tuple[torch.dtype, ...]]] = []

    def noting(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        if operator is torch.ops.aten._to_copy.default:
            for i, tensor in enumerate(tensors):
                if tensor is args[0] and i not in casts:
                    casts[i] = result.dtype
        elif operator not in _COPIES and not _returns_operands(operator) and _has_tensor((args, kwargs)):
            results = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if results:
                made.append((operator._schema.name, tuple(tensor.dtype for tensor in results)))
        return result

    modes = [tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)]
    with modes[0] if modes else nullcontext(), operators_called(noting):  # what is made of nothing has none either
        result = call()
    return Computed(casts, made, result)


_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default)


def makes_new(operator: Any) -> bool:
    """Check that an operator returns neither what it was given nor views of it."""
    return not _returns_operands(operator)


def _returns_operands(operator: Any) -> bool:
    """Whether an operator returns what it was given, or views of it."""
    return any(value.alias_info is not None for value in operator._schema.returns)


def _has_tensor(args: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args))


@contextmanager
def replaced(module: ModuleType, names: Mapping[str, Any]) -> Iterator[None]:
    """Let names of a Python module stand for other things."""
    before = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    try:
        yield
    finally:
        vars(module).update(before)


@contextmanager
def checkpoints_call(around: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Let ``torch.utils.checkpoint.checkpoint`` call its function and recompute nothing.

    Whoever imported it has another name for it, but it looks these two up in its own module. The function is called
    within ``around(problem)``, which gets what torch warns of, "" where that is nothing.
    """

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            # Torch makes gradients of the arguments, and none of the parameters where no argument needs one.
            needed = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            lost = torch.is_grad_enabled() and not needed
            problem = "None of the inputs have requires_grad=True. Gradients will be None" if lost else ""
            with around(problem), torch.no_grad() if lost else nullcontext():
                return function(*args)

    def without_reentrant(function: Any, preserve: bool, context_fn: Any, *_: Any, **__: Any) -> Iterator[None]:
        context, _ = context_fn()
        chooses_what_is_kept = isinstance(context, TorchDispatchMode)
        with around(""), nullcontext() if chooses_what_is_kept else context:
            yield

    names = {"CheckpointFunction": Reentrant, "_checkpoint_without_reentrant_generator": without_reentrant}
    with replaced(checkpointing, names):
        yield


_CHECKPOINT = checkpointing.CheckpointFunction


def is_checkpoint(function: Any) -> bool:
    """Check whether a function with a backward of its own is torch's activation checkpointing."""
    return function is _CHECKPOINT


def call_checkpointed(args: tuple[Any, ...]) -> Any:
    """Call the function of activation checkpointing as `checkpoints_call` has it, whoever asked for it."""
    return checkpointing.CheckpointFunction.apply(*args)  # type: ignore[no-untyped-call]


@contextmanager
def functions_apply(apply: Callable[[Any, tuple[Any, ...]], Any]) -> Iterator[None]:
    """Let ``MyFunction.apply(*args)`` be ``apply(MyFunction, args)`` in this thread, also where ``MyFunction.apply``
    was kept before: it asks this base class, which has no public name."""
    base: Any = _SingleLevelFunction
    thread = get_ident()

    def applied(function: Any, *args: Any) -> Any:
        return apply(function, args) if get_ident() == thread else apply_function(function, args)

    base.apply = classmethod(applied)
    try:
        yield
    finally:
        del base.apply


def apply_function(function: Any, args: tuple[Any, ...]) -> Any:
    """What ``MyFunction.apply(*args)`` does within `functions_apply`."""
    return super(_SingleLevelFunction, function).apply(*args)


@contextmanager
def batch_norms_call(instead: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Let a batch norm without a momentum that trains give ``instead(module, x)`` in this thread: its running
    statistics are averages over all batches, for which it reads the number in a tensor."""
    base: Any = torch.nn.modules.batchnorm._BatchNorm
    thread, forward = get_ident(), base.forward

    def called(module: Any, input: Any) -> Any:  # torch's own name, by which it may be called
        reads = module.momentum is None and module.training and module.track_running_stats
        if not reads or module.num_batches_tracked is None or module.running_mean is None or get_ident() != thread:
            return forward(module, input)
        module._check_input_dim(input)
        return instead(module, input)

    base.forward = called
    try:
        yield
    finally:
        base.forward = forward


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


def trace_beneath_autograd(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """The operators that ``function`` of lists of tensors calls, those of every backward in it too.

    The public exporter records them above autograd. `torch.compiler.is_exporting` is true meanwhile, as under it.
    """
    return _trace(function, args, above_autograd=False)


def trace_above_autograd(function: Callable[..., Any], *args: Any) -> torch.fx.GraphModule:
    """The operators that ``function`` of tensors calls without gradients; what these call in turn is not recorded."""

    def run(*tensors: Any) -> Any:
        with torch._C.DisableTorchFunction():  # the tracer's mode for functions would call the whole operator again
            return function(*tensors)

    with torch.no_grad():
        return _trace(run, args, above_autograd=True)


def _trace(function: Callable[..., Any], args: tuple[Any, ...], *, above_autograd: bool) -> torch.fx.GraphModule:
    before = torch.compiler._is_exporting_flag
    torch.compiler._is_exporting_flag = True
    try:
        return make_fx(function, tracing_mode="real", pre_dispatch=above_autograd, _allow_non_fake_inputs=True)(*args)
    finally:
        torch.compiler._is_exporting_flag = before


@contextmanager
def gradient_transforms_call(by: Callable[..., Any]) -> Iterator[None]:
    """Let every transform of ``torch.func`` that takes gradients call ``by`` before it begins: by whatever name it was
    imported, it looks one of these up in its own module."""
    names = ("grad_impl", "grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")
    with replaced(eager_transforms, dict.fromkeys(names, by)):
        yield


def is_operator(target: Any) -> bool:
    """Whether the target of a node is an operator such as ``torch.ops.aten.linear.default``, of which the type has no
    public name."""
    return isinstance(target, OpOverload)


# Those of torch's operators on lists that do not work entry by entry; operators on lists have no tags that tell.
_NOT_ENTRYWISE = ("_foreach_norm", "_foreach_max", "_foreach_mm", "_foreach_powsum")
_UNTAGGED = ("copy_", "fill_", "masked_fill_", "zero_")
_FUSED_STEPS = ("_fused_sgd_", "_fused_adam_", "_fused_adamw_", "_fused_adagrad_")


@lru_cache(maxsize=4096)
def is_entrywise(operator: Any) -> bool:
    """Return whether each entry of an operator's results follows from those of its operands at the same place alone.

    Cached by the operator itself: one that is defined anew is another object.
    """
    name = operator.overloadpacket.__name__
    tagged = torch.Tag.pointwise in operator.tags and torch.Tag.nondeterministic_seeded not in operator.tags
    listed = name in _UNTAGGED + _FUSED_STEPS or (name.startswith("_foreach_") and name not in _NOT_ENTRYWISE)
    returns = all("Tensor" in str(value.type) for value in operator._schema.returns)  # not a bool, as torch.equal
    return (tagged or (operator.namespace == "aten" and listed)) and returns and not writes_out(operator)


def draws(operator: Any) -> bool:
    """Return whether an operator draws random numbers: the tags are not documented."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def reads_number(operator: Any) -> bool:
    """Return whether an operator is the one by which ``float(x)`` and ``x.item()`` read a number."""
    return operator is torch.ops.aten._local_scalar_dense.default


def writes_out(target: Any) -> bool:
    """Return whether the target of a node is an operator that writes its result into an argument ``out``: only its
    schema tells."""
    return isinstance(target, OpOverload) and any(argument.is_out for argument in target._schema.arguments)


def run_decompositions(program: ExportedProgram, preserved: Iterable[Any]) -> ExportedProgram:
    """Return ``program`` without changes in place, every composite operator decomposed but ``preserved``.

    The table that `ExportedProgram.run_decompositions` takes names what is to be decomposed, and torch goes through the
    operators of all libraries for the others: 0.1 s a call, several times the trace of a small model. Operators that
    nothing is said of are decomposed by their own kernels, to the same operators.
    """
    kept = dict.fromkeys(preserved, _special_op_to_preserve_cia)
    split = {"_split_decomp_table_to_cia_and_python_decomp": lambda table: (kept, table)}
    with replaced(exported_program, split):
        decomposed: ExportedProgram = program.run_decompositions({})
    return decomposed


def preservable_operators() -> Iterator[Any]:
    """Yield the composite operators of ATen that `run_decompositions` can preserve."""
    yield from _collect_all_valid_cia_ops_for_aten_namespace()


def is_composite(operator: Any) -> bool:
    """Whether torch computes an operator by others, forward and backward: only its kernels tell."""
    return bool(_is_cia_op(operator))


def may_stay_whole(operator: Any) -> bool:
    """Return whether `run_decompositions` can leave a composite operator as it is."""
    return bool(_check_valid_to_preserve(operator))


def checks_itself(operator: Any) -> bool:
    """Return whether an operator is one of linear algebra that checks its results: an exported graph would carry such a
    check as a token where these are decomposed."""
    namespace, name, _ = str(operator).split(".")
    unchecked = {"norm", "vecdot", "matmul", "multi_dot", "matrix_norm", "det", "slogdet", "vander"}
    return namespace == "aten" and (
        name in ("inverse", "pinverse") or (name.startswith("linalg_") and name[7:] not in unchecked)
    )


def parts_of(operator: Any) -> Callable[..., Any]:
    """The function by which torch computes a composite operator."""
    parts: Callable[..., Any] = _get_decomp_for_cia(operator)
    return parts


def changes_operands(operator: Any) -> bool:
    """Whether an operator writes into an operand, as its schema says."""
    return bool(operator._schema.is_mutable)


def is_certain(operator: Any) -> bool:
    """Whether the schema of an operator is all that tells what it does: it has no effect beside its results, and is
    none of those whose schema hides what they change or share."""
    return not _should_decompose_because_unsafe_op(operator) and not has_effects(operator)


@lru_cache(maxsize=4096)
def keeps_statistics(operator: Any) -> bool:
    """Whether an operator takes running statistics, into which some write without a word of it in their schema, as
    those of cuDNN do.

    Cached by the operator itself, whose schema never changes: one that is defined anew is another object.
    """
    return any(argument.name == "running_mean" for argument in operator._schema.arguments)


def shared_operands(operator: Any) -> frozenset[int]:
    """The positions of the operands into whose memory the results of an operator look, as its schema says."""
    if all(value.alias_info is None for value in operator._schema.returns):
        return frozenset()
    return frozenset(i for i, argument in enumerate(operator._schema.arguments) if argument.alias_info is not None)


@lru_cache(maxsize=4096)
def written_operands(operator: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each operand that an operator writes into, as its schema says.

    Cached by the operator itself, as `keeps_statistics`.
    """
    return tuple((i, argument.name) for i, argument in enumerate(operator._schema.arguments) if argument.is_write)


def arguments_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator by their names, with its defaults for those that are left out."""
    known = operator._schema.arguments
    defaults = {argument.name: argument.default_value for argument in known if argument.default_value is not None}
    return defaults | dict(zip((argument.name for argument in known), args, strict=False)) | dict(kwargs)


def without_defaults(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments without defaults at their end, as Python leaves them out; C++ takes no missing tensor for one."""
    count = len(args)
    for arg, argument in zip(reversed(args), reversed(operator._schema.arguments[:count]), strict=True):
        default = argument.default_value
        if not argument.has_default_value() or type(arg) is not type(default) or arg != default:
            break
        count -= 1
    return args[:count]


def job_store() -> Any:
    """The key-value store that the ranks of the default process group share, None without a group: torch has no public
    way to it, and a second one would need a second port."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return distributed_c10d._get_default_store()


def members(module: torch.nn.Module) -> tuple[dict[str, torch.nn.Module | None], dict[str, torch.nn.Parameter | None]]:
    """The dictionaries in which a module keeps its children and its parameters: hundreds of names are looked up in them
    before every step, which by public names takes milliseconds."""
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


def copies_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A copy of each of many small tensors: one by one they take longer to be asked for than to be made."""
    together = getattr(torch, "_foreach_clone", None)  # which not every torch has
    copies: Sequence[torch.Tensor] = together(tensors) if together else [tensor.clone() for tensor in tensors]
    return copies


def copy_each(into: list[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy ``tensors`` into others, for the same reason all at once."""
    torch._foreach_copy_(into, list(tensors))


def version(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was changed in place: the counter has no public name."""
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


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator: ``is_tensor`` says that a tensor may stand there, and not a list of tensors."""

    name: str
    default: Any
    is_tensor: bool


def dcp_storage_info(file: str, start: int, length: int) -> Any:
    """Where a container lies, as the reader of ``torch.distributed.checkpoint`` looks it up: its class is private."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # half a second, and needed by saves alone

    return _StorageInfo(file, start, length)


# What `F.grouped_mm` calls, and by that a mode for functions sees it.
grouped_mm = torch._grouped_mm


def has_hook(parameter: torch.Tensor) -> bool:
    """Whether a function is to be given the gradient of a parameter in the backward: only the attributes tell."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Whether a module normalises by statistics of its batch, of any number of dims: their class has no public name."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


class MemoryOf:
    """Stands for the memory in which a tensor lies, and is equal to what stands for the same memory alone.

    It keeps the memory from being taken by another tensor's, but not alive. An address would not do, which is given out
    again, and there is no public weak reference to a tensor's memory.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def __hash__(self) -> int:
        return hash(self._reference)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryOf) and bool(self._reference == other._reference)

    @property
    def is_free(self) -> bool:
        """Whether no tensor lies there any more."""
        return bool(self._reference.expired())  # type: ignore[no-untyped-call]


def changes_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to in place; autograd tells it to nobody else."""
    return tensor._version


def code_from_cache() -> tuple[int, int]:
    """How many parts of programs torch's compiler has found in its cache on disk, and how many it has made.

    What a compilation tells of itself has no public name.
    """
    from torch._dynamo.utils import counters  # seconds, and needed where something is compiled alone

    found, made = counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"]
    return found + counters["aot_autograd"]["autograd_cache_hit"], made


def compiled_code_directory() -> str:
    """Where torch keeps what it has compiled, which no public name tells."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir()


References = tuple[int, int, int]


def references_to(tensor: torch.Tensor) -> References:
    """How many hold a tensor in Python, and how many it and its memory in C++, which no public name tells."""
    held: int = tensor._use_count()  # type: ignore[attr-defined]  # not listed
    return sys.getrefcount(tensor), held, holders_of_memory(tensor)


def holders_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors, and others in C++, have the memory of a tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def views_into(flat: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Where each of several tensors lies in a flat one that has them one behind the other: by one call, in place of
    two for each, for which torch has no public name."""
    return torch._C._nn.unflatten_dense_tensors(flat, tensors)


def looking_into(part: torch.Tensor) -> int:
    """How many tensors look into the memory of ``part``, in any language: it has no public name."""
    count: int = torch._C._storage_Use_Count(part.untyped_storage()._cdata)
    return count - 1  # the storage that this asks


def random_state(generator: torch.Generator | None, device: torch.device) -> bytes:
    """The state of a generator, without one of that which ``device`` draws from, whatever modes are on."""
    if generator is None:
        own = device.type == "cuda"
        generator = torch.cuda.default_generators[device.index or 0] if own else torch.default_generator
    with _disable_current_modes():
        state: bytes = generator.get_state().numpy().tobytes()
    return state


# What a class of tensors has in place of ``__torch_function__`` that sees operators by ``__torch_dispatch__`` alone:
# torch's own way would make its results of that class by a method that DTensors do not have.
no_torch_function = torch._C._disabled_torch_function_impl


def let_optimizers_take_lists(kind: type[torch.Tensor]) -> None:
    """Let torch's optimizers and `clip_grad_norm_` go through lists of such tensors on GPUs, as through lists of plain
    ones and of DTensors, which torch notes in these lists too."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    optimizer._foreach_supported_types.append(kind)
    _foreach_utils._foreach_supported_types.append(kind)


def dtensor_of(tensor: Any, kind: Any = None) -> Any:
    """Return a DTensor as one of the class ``kind``, by default of torch's own, with the same part: the public
    constructors do it for autograd, and for their own class."""
    from torch.distributed.tensor import DTensor  # as above

    return (kind or DTensor)(tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)


def dtensor_like(tensor: Any, part: torch.Tensor) -> Any:
    """Return a DTensor of the class, shape and layout of ``tensor`` that has ``part``: the public constructors take ten
    times as long, and there are hundreds of gradients and states in a step."""
    spec = copy(tensor._spec)
    if part.dtype != tensor.dtype:
        spec.tensor_meta = spec.tensor_meta._replace(dtype=part.dtype)
    return type(tensor)(part, spec, requires_grad=False)


def keep_layout(tensor: Any, changed: Any) -> None:
    """Let a DTensor have the part and the layout of one that stood for it, which an operator has changed."""
    tensor._spec, tensor._local_tensor = changed._spec, changed._local_tensor


def is_view(operator: Any) -> bool:
    """Return whether an operator gives a view of its operand: only operators themselves tell."""
    return bool(operator.is_view)


def changes_view(operator: Any) -> bool:
    """Return whether an operator turns its operand itself into a view, as ``x.t_()``: the tags are not documented."""
    return torch.Tag.inplace_view in operator.tags


def takes_lists(operator: Any) -> bool:
    """Return whether an operator takes lists of tensors: only its schema tells."""
    return any(str(argument.type).startswith("List[Tensor") for argument in operator._schema.arguments)


def knows_no_split(error: Exception) -> bool:
    """Return whether an error says that torch's DTensor knows no way to do an operator on parts, and has not begun."""
    text = str(error)
    return "Sharding propagation failed" in text or "sharding strategy" in text


def part_of(tensor: Any) -> torch.Tensor:
    """What this rank holds of a DTensor, the tensor itself: ``to_local`` makes another where gradients are on."""
    return waited_for(tensor._local_tensor)


def waited_for(part: Any) -> torch.Tensor:
    """A part of a DTensor, which stands within another tensor as long as it is on its way from other ranks."""
    found: torch.Tensor = part.trigger_wait() if hasattr(part, "trigger_wait") else part
    return found


def put_part(tensor: Any, part: torch.Tensor) -> None:
    """Let a DTensor be one of which this rank holds ``part``, as nothing public does to one that others know."""
    tensor._local_tensor = part


def tell_of_dropped_gradients(told: Callable[[torch.optim.Optimizer], object]) -> None:
    """Call ``told(optimizer)`` after each ``optimizer.zero_grad()``, which has no hooks."""
    zero: Any = torch.optim.Optimizer.zero_grad

    @wraps(zero)
    def zero_grad(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        zero(optimizer, *args, **kwargs)
        told(optimizer)

    torch.optim.Optimizer.zero_grad = zero_grad  # type: ignore[assignment,method-assign]


class _LocalPart(torch.autograd.Function):
    """``DTensor.to_local``, whose backward makes a DTensor in seven microseconds, not in eighty."""

    @staticmethod
    def forward(ctx: Any, parameter: Any) -> torch.Tensor:
        part: torch.Tensor = parameter._local_tensor
        ctx.kind, ctx.spec, ctx.stride = type(parameter), parameter._spec, part.stride()
        ctx.set_materialize_grads(False)  # a parameter without a gradient is not to get zeros
        return part.view_as(part)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if gradient is None:
            return None
        if gradient.is_sparse:  # of a table that an earlier plan splits, and this one has whole
            gradient = gradient.to_dense()
        if gradient.stride() != ctx.stride:  # autograd would copy a plain parameter's, too
            gradient = gradient.new_empty_strided(gradient.shape, ctx.stride).copy_(gradient)
        made: torch.Tensor = ctx.kind(gradient, copy(ctx.spec), requires_grad=False)
        return made


def local_part(parameter: Any, differentiable: bool = True) -> torch.Tensor:
    """Return what this rank holds of a DTensor, differentiably once or detached.

    The public constructors check what is known here.
    """
    if not differentiable:
        held: torch.Tensor = parameter._local_tensor.detach()
        return held
    part: torch.Tensor = _LocalPart.apply(parameter)  # type: ignore[no-untyped-call]
    return part


def _operator(op: str) -> Any:
    """What ``"aten.split.Tensor"`` or ``"aten.split"`` names, None where that is no operator."""
    found: Any = torch.ops
    for part in op.split("."):
        found = getattr(found, part, None)
    return found


def returns_list(op: str) -> bool:
    """Whether ``"aten.split.Tensor"`` returns a list of tensors, even of one: no public name tells."""
    found = _operator(op)
    return found is not None and [str(value.type) for value in found._schema.returns] == ["List[Tensor]"]


def overloads_of(op: str) -> tuple[str, ...]:
    """The full names of the operators that ``"aten.split"`` or ``"aten.split.Tensor"`` stands for, none where torch
    has none: the types that tell an operator from its overloads have no public names."""
    found = _operator(op)
    if isinstance(found, OpOverload):
        return (op,)
    packet: Any = found  # whose methods have no types
    return tuple(f"{op}.{one}" for one in packet.overloads()) if isinstance(found, OpOverloadPacket) else ()


def is_pointwise(op: str) -> bool:
    """Whether ``"aten.add.Tensor"`` makes a new tensor, each number from those at the same place: the tags of an
    operator are not documented."""
    return torch.Tag.pointwise in getattr(_operator(op), "tags", ())


def tensors_taken(op: str) -> int | None:
    """How many tensors an operator takes, those that may be left out too; None where it takes lists of them, and for
    what is no operator of torch's."""
    found = _operator(op)
    return None if found is None else _tensors(argument.type for argument in found._schema.arguments)


def tensors_returned(op: str) -> int | None:
    """How many tensors an operator returns; None as of `tensors_taken`."""
    found = _operator(op)
    return None if found is None else _tensors(value.type for value in found._schema.returns)


def _tensors(types: Iterable[Any]) -> int | None:
    names = [str(type) for type in types]
    if any("Tensor" in name and name.startswith("List") for name in names):
        return None
    return sum(name in ("Tensor", "Optional[Tensor]") for name in names)


def schema_parameters(op: str) -> tuple[Parameter, ...]:
    """The parameters of ``"aten.linear.default"``, in order: no public name leads to an operator's schema."""
    return _parameters_of(_operator(op))


@lru_cache(maxsize=4096)
def _parameters_of(operator: Any) -> tuple[Parameter, ...]:
    """Cached by the operator itself, whose schema never changes; by its name a user may have defined another one."""
    return tuple(
        Parameter(a.name, a.default_value, str(a.type) in ("Tensor", "Optional[Tensor]"))
        for a in operator._schema.arguments
    )


def acts_on_loads(module: torch.nn.Module) -> bool:
    """Whether a module or one in it does more at `load_state_dict` than take tensors: no public name tells of hooks,
    nor of the method by which a class takes what is its own, which torch's documentation lets users override."""
    return any(
        each._load_state_dict_pre_hooks
        or each._load_state_dict_post_hooks
        or not type(each)._load_from_state_dict.__module__.startswith("torch.")
        for each in module.modules()
    )


def operators_are_watched() -> bool:
    """Whether a profiler, or a mode as `CommDebugMode`, looks at the operators that this thread calls.

    There is no public way to ask.
    """
    return bool(torch.autograd._profiler_enabled()) or torch._C._len_torch_dispatch_stack() > 0  # type: ignore[attr-defined]
