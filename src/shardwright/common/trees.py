"""Trees of tuples, lists and dicts, as `torch.utils._pytree` takes them apart; subclasses of tuple count as tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardwright.common.torch_private import pytree


def _is_tuple_subclass(tree: Any) -> bool:
    return (
        isinstance(tree, tuple)
        and type(tree) is not tuple
        and type(tree) not in pytree.SUPPORTED_NODES
        and not pytree.is_namedtuple_instance(tree)
    )


def _plain_tuples(tree: Any) -> Any:
    """Return the same tree with unregistered subclasses of tuple, which pytree takes for leaves, as plain tuples."""
    if _is_tuple_subclass(tree):
        return tuple(_plain_tuples(item) for item in tree)
    return pytree.tree_map(
        lambda leaf: _plain_tuples(leaf) if _is_tuple_subclass(leaf) else leaf, tree, is_leaf=_is_tuple_subclass
    )


def tree_flatten(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Return leaves with their paths (``0``, ``image``, ``1.mask``) and the spec."""
    leaves, spec = pytree.tree_flatten_with_path(_plain_tuples(tree))
    return [(".".join(_step(key) for key in path), leaf) for path, leaf in leaves], spec


def structure_of(spec: Any) -> tuple[Any, ...]:
    """Return the spec of a tree as tuples: the type of a node, its context, and the same for its children.

    The context is, for example, the keys of a dict. Torch 2.11 has another name for the children.
    """
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    return spec.type, spec.context, tuple(map(structure_of, children))


def keys_in(tree: Any) -> Iterator[Any]:
    """Yield the keys of mappings on the ways to the leaves of a tree."""
    for path, _ in pytree.tree_flatten_with_path(_plain_tuples(tree))[0]:
        yield from (key.key for key in path if isinstance(key, pytree.MappingKey))


def _step(key: Any) -> str:
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with ``function`` of every leaf; subclasses of tuple become tuples."""
    return pytree.tree_map(function, _plain_tuples(tree))


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, without their paths."""
    return pytree.tree_leaves(tree)


def tree_unflatten(leaves: list[Any], spec: Any) -> Any:
    """Return the tree of which `tree_flatten` gave ``spec``."""
    return pytree.tree_unflatten(leaves, spec)
