"""What enters a program and what leaves it: the layouts that are settled before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.compiler.capture.ir import Capture, Value
from shardwright.compiler.mesh.layout import Layout, Split
from shardwright.compiler.mesh.mesh import Mesh
from shardwright.compiler.plan.request import Inputs
from shardwright.errors import UsageError


def fixed_leaves(
    capture: Capture, mesh: Mesh, inputs: Inputs, storage: Mapping[str, Layout], *, every_rank: bool
) -> dict[str, Sequence[Layout]]:
    """The leaves whose layout is given: inputs as asked for, buffers and constants replicated, stored parameters."""
    found: dict[str, Sequence[Layout]] = {}
    alone: dict[Layout, Sequence[Layout]] = {}  # equal ones are one object
    for value in capture.values.values():
        if value.kind in ("buffer", "constant"):
            layout = Layout.replicated(len(value.shape))
        elif value.kind == "input":
            layout = _input_layout(value, capture, mesh, inputs, every_rank)
        elif value.kind == "parameter" and value.name in storage:
            layout = storage[value.name]
        else:
            continue
        found[value.name] = alone.setdefault(layout, (layout,))
    if isinstance(inputs, Mapping):
        labels = [value.label for value in capture.of_kind("input")]
        unknown = sorted(set(inputs) - set(labels))
        if unknown:
            raise UsageError(f"inputs names {unknown}, the batch has {labels}")
    return found


def _input_layout(value: Value, capture: Capture, mesh: Mesh, inputs: Inputs, every_rank: bool) -> Layout:
    ndim = len(value.shape)
    if isinstance(inputs, Mapping):
        if value.label not in inputs:
            return Layout.replicated(ndim)
        return _layout_of_slices(value, tuple(inputs[value.label]), mesh)
    if inputs == "split" and value.shape and value.shape[0] == _rows_of_batch(capture):
        return Layout.split(ndim, {0: mesh.names if every_rank else _axes_for(value.shape[0], mesh)})
    return Layout.replicated(ndim)


def _rows_of_batch(capture: Capture) -> int:
    """The number of rows of the global batch: the first dim of the first input that has one; 0 without any."""
    return next((value.shape[0] for value in capture.of_kind("input") if value.shape), 0)


def _axes_for(rows: int, mesh: Mesh) -> tuple[str, ...]:
    """The leading axes over which every rank gets at least a row."""
    axes: list[str] = []
    for axis in mesh.names:
        if mesh.extent([*axes, axis]) <= rows:
            axes.append(axis)
    return tuple(axes)


def _layout_of_slices(value: Value, slices: tuple[int, ...], mesh: Mesh) -> Layout:
    if len(slices) != len(value.shape):
        raise UsageError(f"inputs[{value.label!r}] = {slices} needs one number per dim of {value.shape}")
    free = list(mesh.names)
    dims = []
    for number in slices:
        axes: list[str] = []
        while mesh.extent(axes) < number and free:
            axes.append(free.pop(0))
        if mesh.extent(axes) != number:
            raise UsageError(f"inputs[{value.label!r}] = {slices} does not fit the mesh {mesh}")
        dims.append(Split(tuple(axes)))
    return Layout(tuple(dims))


def output_layouts(capture: Capture, mesh: Mesh, leaves: Mapping[str, Sequence[Layout]]) -> dict[str, Layout]:
    """How values leave the program: the loss and new buffers whole, of auxiliary outputs a rank's rows of the batch."""
    rows = next((leaves[v.name][0].dims[0] for v in capture.of_kind("input") if v.shape), Split())
    found = {capture.loss: Layout.replicated(0)} if capture.loss else {}
    for name in capture.aux:
        shape = capture.values[name].shape
        by_rows = name in capture.returned and bool(shape) and shape[0] == _rows_of_batch(capture)
        found[name] = Layout((rows if by_rows else Split(), *[Split()] * (len(shape) - 1)) if shape else ())
    for name in capture.mutations.values():
        found[name] = Layout.replicated(len(capture.values[name].shape))
    return found
