"""Boxes of a tensor, each written by itself to where it belongs, are the tensor that safetensors reads."""

import itertools
import os

import pytest
import torch
from safetensors.torch import load_file

import shardwright as sw
from shardwright.checkpoint.exchange.safetensors_layout import lay_out, write_box
from shardwright.checkpoint.format.containers import memory_of
from shardwright.checkpoint.format.manifest import Box
from shardwright.errors import CheckpointError, UsageError


def test_boxes_come_to_stand_where_they_belong(tmp_path):
    whole = {"a": torch.randn(5, 4, 6).bfloat16(), "b": torch.randn(7), "c": torch.randn(()), "d": torch.randn(0, 3)}
    layout = lay_out({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()})
    path = tmp_path / "model.safetensors"
    path.write_bytes(layout.begin + bytes(layout.size_bytes - len(layout.begin)))
    descriptor = os.open(path, os.O_WRONLY)
    for name, tensor in whole.items():
        cuts = [((0, size // 2), (size // 2, size)) for size in tensor.shape]
        for ranges in itertools.product(*cuts):
            box = Box(tuple(start for start, _ in ranges), tuple(stop - start for start, stop in ranges))
            part = tensor[tuple(slice(*one) for one in ranges)].contiguous()
            write_box(descriptor, layout.starts[name], tuple(tensor.shape), tensor.itemsize, box, memory_of(part))
    os.close(descriptor)
    read = load_file(path)
    assert read.keys() == whole.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in whole.items())


def test_a_model_that_transformers_would_not_read_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"Linear is no model of transformers; type sw.checkpoint.save"):
        sw.checkpoint.save_pretrained(torch.nn.Linear(2, 2), tmp_path / "model")
    assert not list(tmp_path.iterdir())


class Config:
    """What a model of transformers has for one; it may fail to be written."""

    fails = False

    def save_pretrained(self, folder):
        if Config.fails:
            raise ValueError("temperature is set without do_sample")
        (folder / "config.json").write_text("{}")


class Model(torch.nn.Module):
    """As much of a model of transformers as is asked for to write it."""

    config, dtype = Config(), torch.float32

    def __init__(self, value):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.full((64,), value)) for _ in range(2))

    def save_pretrained(self):
        raise NotImplementedError

    def can_generate(self):
        return False

    def num_parameters(self):
        return 128


def test_a_model_is_replaced_by_a_whole_one_or_not_at_all(tmp_path, monkeypatch):
    sw.checkpoint.save_pretrained(Model(1.0), tmp_path, max_shard_size=256)
    several = sorted(path.name for path in tmp_path.iterdir())
    assert len(several) == 4  # two parts, their index, and a configuration
    monkeypatch.setattr(Config, "fails", True)
    with pytest.raises(CheckpointError, match="temperature is set"):
        sw.checkpoint.save_pretrained(Model(2.0), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == several
    assert load_file(tmp_path / "model-00001-of-00002.safetensors")["a"][0] == 1
    monkeypatch.setattr(Config, "fails", False)
    sw.checkpoint.save_pretrained(Model(2.0), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    assert load_file(tmp_path / "model.safetensors")["b"][0] == 2
