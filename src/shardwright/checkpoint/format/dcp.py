"""The index that ``torch.distributed.checkpoint`` reads: ``.metadata``, made from the manifest."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.checkpoint.format.manifest import Extent, Manifest, TensorEntry
from shardwright.common.torch_private import dcp_storage_info

METADATA = ".metadata"


def metadata(manifest: Manifest) -> bytes:
    """The pickled metadata with which ``dcp.load`` and ``dcp_to_torch_save`` read the same files."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, Any] = {}
    for name, entry in manifest.entries.items():
        if not isinstance(entry, TensorEntry):
            described[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = _stored(entry.place)
            continue
        chunks: list[ChunkStorageMetadata] = []
        for chunk in entry.chunks:
            offsets, sizes = torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes)
            stored[MetadataIndex(name, offsets, len(chunks))] = _stored(chunk.place)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        described[name] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), chunks)
    paths = {name: entry.path for name, entry in manifest.entries.items()}
    return pickle.dumps(Metadata(described, paths, stored, StorageMeta()))


def _stored(place: Extent) -> Any:
    return dcp_storage_info(place.file, place.start, place.length)
