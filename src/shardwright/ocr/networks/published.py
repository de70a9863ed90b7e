"""The weights of torchvision that backbones of detectors may begin with, and how torchvision calls them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.ocr.networks.layers import Pyramid

ADDRESS = "https://download.pytorch.org/models/"


@dataclass(frozen=True)
class Published:
    """Weights of a network of torchvision, trained on ImageNet.

    Attributes:
        network: what torchvision calls the network.
        file: the name of the file, below `ADDRESS` and in the cache of `torch.hub`.
        head: the module that makes classes of features, which detectors do not have.
        needs: the options of a backbone, by their keys, with which it is that network.
        name_of: the name that torchvision has for each entry of the state of a backbone.
        eps: what its batch normalisations add to variances.
    """

    network: str
    file: str
    head: str
    needs: Mapping[str, Any]
    name_of: Callable[[Pyramid], Mapping[str, str]]
    eps: float = 1e-5

    @property
    def url(self) -> str:
        return ADDRESS + self.file

    def problems(self, options: Any) -> list[str]:
        """Return in which options of a backbone it is not that network, a line each."""
        return [
            f"model.backbone.{key}: torchvision has weights of {self.network} with {value} alone, got {got}; "
            f"type -o model.backbone.{key}={value}, or -o model.backbone.pretrained=False"
            for key, value in self.needs.items()
            if (got := _option(options, key)) != value
        ]

    def into(self, pyramid: Pyramid, state: Mapping[str, Tensor]) -> None:
        """Load a state of torchvision's network into a backbone.

        Raises:
            UsageError: with a line for all that is missing, unknown or of another shape; nothing is then loaded.
        """
        own, names = pyramid.state_dict(), self.name_of(pyramid)
        # Files of before 2018 do not count batches, which matters to no normalisation with a momentum.
        missing = [
            theirs for theirs in names.values() if theirs not in state and not theirs.endswith("batches_tracked")
        ]
        unknown = [name for name in state if name not in set(names.values()) and not name.startswith(f"{self.head}.")]
        differing = [
            f"{theirs} {list(state[theirs].shape)}, expected {list(own[ours].shape)}"
            for ours, theirs in names.items()
            if theirs in state and state[theirs].shape != own[ours].shape
        ]
        found = (("lacks", missing), ("has besides", unknown), ("has of another shape", differing))
        if any(listed for _, listed in found):
            raise UsageError(
                f"{self.file} is no state of torchvision's {self.network}: it "
                + "; it ".join(f"{what} {_some(listed)}" for what, listed in found if listed)
            )
        pyramid.load_state_dict(own | {ours: state[theirs] for ours, theirs in names.items() if theirs in state})


def _option(options: Any, key: str) -> Any:
    for part in key.split("."):
        options = getattr(options, part)
    return options


def _some(listed: list[str]) -> str:
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")


def _resnet_names(last_norm: str) -> Callable[[Pyramid], Mapping[str, str]]:
    changes = (
        ("stem.0.", "conv1."),
        ("stem.1.", "bn1."),
        (".last_norm.", f".{last_norm}."),
        (".shortcut.", ".downsample."),
    )

    def name_of(pyramid: Pyramid) -> Mapping[str, str]:
        names = {}
        for ours in pyramid.state_dict():
            theirs = re.sub(r"^stages\.(\d+)", lambda found: f"layer{int(found[1]) + 1}", ours)
            for before, after in changes:
                theirs = theirs.replace(before, after)
            names[ours] = theirs
        return names

    return name_of


def _mobilenet_names(pyramid: Pyramid) -> Mapping[str, str]:
    """The blocks of all stages are one row in torchvision's network, and a block has no layer that does nothing."""
    places = {id(pyramid.stem): "features.0."}
    blocks = [block for stage in pyramid.stages.children() for block in stage.children()]
    for number, block in enumerate(blocks, 1):
        layers = getattr(block, "layers", None)
        if layers is None:
            places[id(block)] = f"features.{number}."
            continue
        kept = [layer for layer in layers if not isinstance(layer, nn.Identity)]
        places |= {id(layer): f"features.{number}.block.{at}." for at, layer in enumerate(kept)}
    return {
        f"{path}.{name}": places[id(module)] + name.replace("reduce.", "fc1.").replace("expand.", "fc2.")
        for path, module in pyramid.named_modules()
        if id(module) in places
        for name in module.state_dict()
    }


RESNET18 = Published("resnet18", "resnet18-f37072fd.pth", "fc", {"width": 64}, _resnet_names("bn2"))
RESNET50 = Published("resnet50", "resnet50-0676ba61.pth", "fc", {"width": 64}, _resnet_names("bn3"))
MOBILENET = Published(
    "mobilenet_v3_large", "mobilenet_v3_large-8738ca79.pth", "classifier",
    {"alpha": 1.0, "bottleneck_params.se_version": "SqueezeExcite", "bottleneck_params.always_expand": False},
    _mobilenet_names, eps=1e-3,
)  # fmt: skip
