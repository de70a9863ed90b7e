"""The contents of a batch, and its difference to another one in words that name the user's tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwright.common.trees import keys_in, tree_flatten
from shardwright.compiler.capture.tracing.outside.values import NOT_PLAIN, PLAIN, plain
from shardwright.compiler.capture.tracing.sizes.open_sizes import in_batch
from shardwright.errors import UsageError


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of the inputs of its capture.

    Raises:
        UsageError: where the batch holds something else that a program would keep as it is, or tensors without values.
    """
    leaves, _ = tree_flatten(batch)
    if problem := _problem(batch, leaves, sample=False):
        raise UsageError(problem)
    return [leaf for _, leaf in leaves if isinstance(leaf, Tensor)]


def problem_with_sample(batch: Any) -> str | None:
    """Return what is wrong with a sample batch, None where nothing is. Its tensors may be without values."""
    return _problem(batch, tree_flatten(batch)[0], sample=True)


def _problem(batch: Any, leaves: list[tuple[str, Any]], *, sample: bool) -> str | None:
    for key in keys_in(batch):
        if plain(key) is NOT_PLAIN:
            return (
                f"the batch has a dict with a {type(key).__name__} as a key, {key!r}, which cannot be looked into; use "
                "words, numbers, or tuples of these as keys"
            )
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_meta and not sample:
                return (
                    f"{in_batch(path or 'batch')} is on the meta device, where tensors have no values; pass real ones"
                )
        elif not isinstance(leaf, PLAIN):
            name, kind = in_batch(path or "batch"), type(leaf).__name__
            if hasattr(leaf, "__array__"):
                return f"{name} is a {kind}, of which a program would keep the numbers; pass torch.as_tensor(...) of it"
            return (
                f"{name} is a {kind}, which cannot be looked into; pass tensors, numbers and words in tuples, lists, "
                "dicts or classes that torch.export.register_dataclass knows"
            )
    return None


def described(batch: Any) -> dict[str, str]:
    """The tensors of a batch and what stands beside them, by where they stand; sizes of the first dim are left out."""
    return {in_batch(path or "batch"): _kind(leaf) for path, leaf in tree_flatten(batch)[0]}


def difference(batch: Any, sample: dict[str, str]) -> str:
    """In what a batch differs from the sample batch, empty where it does not."""
    found = described(batch)
    texts = [f"{name} is {kind}, not {sample[name]}" for name, kind in found.items() if sample.get(name, kind) != kind]
    texts += [f"{name} ({kind}) is new" for name, kind in found.items() if name not in sample]
    texts += [f"{name} ({kind}) is missing" for name, kind in sample.items() if name not in found]
    return f"The batch is not like the sample batch: {'; '.join(texts)}." if texts else ""


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{['n', *leaf.shape[1:]] if leaf.ndim else []}".replace("'n'", "n")
