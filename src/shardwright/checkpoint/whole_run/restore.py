"""Restores a run from a checkpoint; everything that can be checked is checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from shardwright.checkpoint.format.manifest import Entry, TensorEntry, ValueEntry
from shardwright.checkpoint.loading.load import load as fill
from shardwright.checkpoint.loading.match import Rename, renamed_path, renamer_of
from shardwright.checkpoint.loading.source import Source
from shardwright.checkpoint.whole_run.run_state import Run, put_generators
from shardwright.checkpoint.whole_run.state import (
    Path,
    empty_optimizer_state,
    match_groups,
    model_state,
    module_of,
    parallelized,
    put_model_state,
    put_optimizer_state,
)
from shardwright.distributed.ranks import Ranks
from shardwright.errors import CheckpointError


@dataclass(frozen=True)
class RunRestore:
    """A load that fits, as far as can be known before any tensor is read. Nothing has been changed so far."""

    source: Source
    run: Run
    wanted: Mapping[Path, Any]
    groups: list[Mapping[str, Any]] | None
    values: Mapping[str, Any]
    strict: bool
    rename: Rename | None

    @staticmethod
    def of(source: Source, run: Run, strict: bool, rename: Rename | None) -> RunRestore:
        entries = {entry.path: entry for entry in source.manifest.entries.values()}
        values = {p[1]: source.value(e) for p, e in entries.items() if p[0] == "run" and isinstance(e, ValueEntry)}
        for name in run.others:
            if strict and name not in values:
                raise CheckpointError(
                    f"{source.where} has no {name}: it was saved without one; leave out {name}=, or type strict=False"
                )
        module = module_of(run.model)
        wanted: dict[Path, Any] = {**model_state(module), **run.averages()}
        groups, apply = None, renamer_of(entries, rename)
        renamed = [replace(entry, path=renamed_path(path, apply)) for path, entry in entries.items()]
        if run.optimizer is not None:
            saved = _saved_groups(source, renamed, apply)
            if saved:
                groups = match_groups(run.optimizer, module, saved, values.get("optimizer", "an optimizer"), strict)
                wanted |= empty_optimizer_state(run.optimizer, module, renamed)
                wanted |= {("optimizer", "param_groups", str(i)): None for i in range(len(saved))}
            elif strict:
                raise CheckpointError(
                    f"{source.where} has no optimizer: it was saved without one; load it without optimizer=, or type "
                    "strict=False to begin with a new one"
                )
        if strict:
            _check_tied(source, {entry.path: entry for entry in renamed}, wanted)
        if run.loader is not None and "loader" in values:
            run.loader.load_state_dict(values["loader"])
        return RunRestore(source, run, wanted, groups, values, strict, rename)

    def fill(self) -> tuple[str, ...]:
        """Read the tensors; the names of what is not loaded."""
        found = fill(self.source, self.wanted, strict=self.strict, rename=self.rename)
        values = {path: found.values.get(path, value) for path, value in self.wanted.items()}
        put_model_state(module_of(self.run.model), values)
        if self.run.optimizer is not None and self.groups is not None:
            put_optimizer_state(self.run.optimizer, module_of(self.run.model), self.groups, values)
        return (*found.match.missing, *found.match.extra, *found.match.differing)

    def put(self, ranks: Ranks) -> None:
        """The values, once all ranks have their tensors."""
        for name in ("scheduler", "scaler"):
            if name in self.run.others and self.values.get(name):
                self.run.others[name].load_state_dict(self.values[name])
        ours = parallelized(self.run.model)
        if ours is not None and "random" in self.values:
            ours.load_random_state(self.values["random"])
        if "generators" in self.values:
            put_generators(self.values["generators"], ranks)


def _check_tied(source: Source, entries: Mapping[Path, Entry], wanted: Mapping[Path, Any]) -> None:
    """Raises `CheckpointError` where names of one tensor here are names of different ones in the checkpoint."""
    first: dict[int, Path] = {}
    for path, tensor in wanted.items():
        one, other = entries.get(first.setdefault(id(tensor), path)), entries.get(path)
        if isinstance(tensor, Tensor) and isinstance(one, TensorEntry) and isinstance(other, TensorEntry):
            contents = [[(c.box, c.place.checksums) for c in entry.chunks] for entry in (one, other)]
            if contents[0] != contents[1]:
                raise CheckpointError(
                    f"{one.name} and {other.name} are one tensor here (tied), but two that differ in {source.where}; "
                    "build the model as it was saved, or type strict=False to take the second"
                )


def _saved_groups(source: Source, entries: list[Entry], apply: Callable[[str], str]) -> list[Mapping[str, Any]]:
    found = [e for e in entries if e.path[:2] == ("optimizer", "param_groups") and isinstance(e, ValueEntry)]
    groups = [source.value(entry) for entry in sorted(found, key=lambda entry: int(entry.path[2]))]
    return [{**group, "params": [apply(name) for name in group["params"]]} for group in groups]
