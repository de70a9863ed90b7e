"""Kernels of attention that a step chooses by ``torch.nn.attention.sdpa_kernel``: part of the operators it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.common.signatures import arguments_of
from shardwright.common.torch_private import attention_backends
from shardwright.compiler.capture.tracing.sources import source_of
from shardwright.compiler.rules.table import Column, column
from shardwright.errors import CaptureError

BACKENDS = "shardwright_attention_backends"  # the key of the annotation that some kernels of attention are switched off
_ATTENTION: Column[bool] = column(("scaled_dot_product_attention", True))


@contextmanager
def every_backend() -> Iterator[None]:
    """Allow all kernels of attention, so that those that the step itself chooses are seen.

    What is chosen around the step is in force when it runs.
    """
    with sdpa_kernel(list(SDPBackend.__members__.values())[1:]):
        yield


def chosen() -> dict[str, str]:
    """Return the annotation of operators that are called now."""
    given = attention_backends()
    order = [backend.name for backend in given]
    return {} if len(given) == len(SDPBackend.__members__) - 1 else {BACKENDS: " ".join(order)}


def backends_of(node: Node, op: str) -> dict[str, tuple[str, ...]]:
    """Return the argument of a graph's operator that says which kernels may compute it, the first ones first.

    Raises:
        CaptureError: where it drops weights, which no kernel of torch's does by their global position.
    """
    names = (node.meta.get("custom") or {}).get(BACKENDS)
    if names is None or not _ATTENTION.of(op):
        return {}
    if arguments_of(node.target, node.args, node.kwargs)["dropout_p"]:
        raise CaptureError(
            f"sdpa_kernel chooses {names.replace(' ', ', ')} for attention with dropout, at {source_of(node)}\n"
            "Each of torch's kernels draws dropout from the device's own generator, so that ranks would disagree; "
            "Shardwright computes it without them. Leave sdpa_kernel out there, or set dropout_p=0.0."
        )
    return {"backends": tuple(names.split())}
