"""Weights that a network begins with: torchvision's by their names, from the cache of torch.hub, or what to fetch."""

import urllib.error

import pytest
import torch

from shardwright.errors import CheckpointError, UsageError
from shardwright.ocr.networks.dbnet import DBNet
from shardwright.ocr.networks.published import MOBILENET, RESNET18, RESNET50
from shardwright.ocr.options.parts import BACKBONES, HEADS, NECKS, Bottlenecks
from shardwright.ocr.options.sections import Model
from shardwright.ocr.weights import backbone_problems, begin, network_problems


def norm(name, channels):
    state = {
        f"{name}.{entry}": torch.rand(channels) + 0.5 for entry in ("weight", "bias", "running_mean", "running_var")
    }
    return state | {f"{name}.num_batches_tracked": torch.tensor(7)}


def torchvision_resnet(block, depths):
    """The state of torchvision's network, as its file is published: names and shapes are written down here."""
    state = {"conv1.weight": torch.randn(64, 3, 7, 7)} | norm("bn1", 64)
    inputs = 64
    for stage, depth in enumerate(depths):
        width, outputs = 64 << stage, (64 << stage) * (4 if block == "bottleneck" else 1)
        for at in range(depth):
            path = f"layer{stage + 1}.{at}"
            kernels = ((1, inputs, width), (3, width, width), (1, width, outputs))
            kernels = kernels if block == "bottleneck" else ((3, inputs, width), (3, width, width))
            for number, (kernel, before, after) in enumerate(kernels, 1):
                state[f"{path}.conv{number}.weight"] = torch.randn(after, before, kernel, kernel) / 20
                state |= norm(f"{path}.bn{number}", after)
            if at == 0 and (stage or outputs != inputs):
                state[f"{path}.downsample.0.weight"] = torch.randn(outputs, inputs, 1, 1) / 20
                state |= norm(f"{path}.downsample.1", outputs)
            inputs = outputs
    return state | {"fc.weight": torch.randn(1000, inputs), "fc.bias": torch.randn(1000)}


# kernel, expanded, outputs, inner channels of squeeze and excitation; of torchvision 0.20.
MOBILE_ROWS = [
    (3, 16, 16, 0), (3, 64, 24, 0), (3, 72, 24, 0), (5, 72, 40, 24), (5, 120, 40, 32), (5, 120, 40, 32),
    (3, 240, 80, 0), (3, 200, 80, 0), (3, 184, 80, 0), (3, 184, 80, 0), (3, 480, 112, 120), (3, 672, 112, 168),
    (5, 672, 160, 168), (5, 960, 160, 240), (5, 960, 160, 240),
]  # fmt: skip


def torchvision_mobilenet():
    state = {"features.0.0.weight": torch.randn(16, 3, 3, 3)} | norm("features.0.1", 16)
    inputs = 16
    for number, (kernel, inner, outputs, squeezed) in enumerate(MOBILE_ROWS, 1):
        layers = [(inner, inputs, 1)] * (inner != inputs) + [(inner, 1, kernel)]
        layers += [squeezed] * bool(squeezed) + [(outputs, inner, 1)]
        for at, layer in enumerate(layers):
            path = f"features.{number}.block.{at}"
            if isinstance(layer, int):
                state |= {f"{path}.fc1.weight": torch.randn(layer, inner, 1, 1), f"{path}.fc1.bias": torch.randn(layer)}
                state |= {f"{path}.fc2.weight": torch.randn(inner, layer, 1, 1), f"{path}.fc2.bias": torch.randn(inner)}
                continue
            after, before, side = layer
            state[f"{path}.0.weight"] = torch.randn(after, before, side, side) / 20
            state |= norm(f"{path}.1", after)
        inputs = outputs
    state |= {"features.16.0.weight": torch.randn(960, 160, 1, 1)} | norm("features.16.1", 960)
    head = {"classifier.0.weight": torch.randn(1280, 960), "classifier.0.bias": torch.randn(1280)}
    return state | head | {"classifier.3.weight": torch.randn(1000, 1280), "classifier.3.bias": torch.randn(1000)}


STATES = {
    "det_resnet18": (RESNET18, lambda: torchvision_resnet("basic", (2, 2, 2, 2)), 11_689_512),
    "det_resnet50": (RESNET50, lambda: torchvision_resnet("bottleneck", (3, 4, 6, 3)), 25_557_032),
    "det_mobilenet_v3": (MOBILENET, torchvision_mobilenet, 5_483_032),
}


def model_of(name, pretrained=True, **options):
    backbone = BACKBONES.rows[name].options(name=name, pretrained=pretrained, **options)
    return Model(type="det", backbone=backbone, neck=NECKS.options("DBFPN"), head=HEADS.options("DBHead"))


def network_of(model):
    return DBNet(BACKBONES.row(model.backbone).make(model.backbone), 16)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache, and no network."""

    def refuse(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, "urlopen", refuse)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("name", STATES)
def test_published_weights_go_where_torchvision_has_them(name, hub):
    """Every entry but the classes of ImageNet is taken, and the network is as large as the published one."""
    published, make, size = STATES[name]
    torch.manual_seed(0)
    state = make()
    kinds = ("running_mean", "running_var", "num_batches_tracked")
    assert sum(tensor.numel() for entry, tensor in state.items() if not entry.endswith(kinds)) == size
    torch.save(state, hub / published.file)
    model = model_of(name, **({"alpha": 1.0} if name == "det_mobilenet_v3" else {}))
    assert backbone_problems(model) == []
    network = network_of(model)
    begin(model, network)
    own = network.backbone.state_dict()
    names = published.name_of(network.backbone)
    assert sorted(names.values()) == sorted(entry for entry in state if not entry.startswith(published.head + "."))
    assert all(torch.equal(own[ours], state[theirs].to(own[ours].dtype)) for ours, theirs in names.items())
    norms = [module for module in network.backbone.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert {module.eps for module in norms} == {1e-3 if name == "det_mobilenet_v3" else 1e-5}


def test_a_resnet_with_published_weights_computes_what_torchvision_does(hub):
    """The first block of each stage, by hand from the published names."""
    state = torchvision_resnet("basic", (2, 2, 2, 2))
    torch.save(state, hub / RESNET18.file)
    model = model_of("det_resnet18")
    network = network_of(model)
    begin(model, network)
    functional = torch.nn.functional

    def layer(x, path, bn, stride, padding):
        x = functional.conv2d(x, state[f"{path}.weight"], stride=stride, padding=padding)
        stats = (state[f"{bn}.{entry}"] for entry in ("running_mean", "running_var", "weight", "bias"))
        return functional.batch_norm(x, *stats)

    def block(x, path, stride):
        y = layer(x, f"{path}.conv1", f"{path}.bn1", stride, 1).relu()
        y = layer(y, f"{path}.conv2", f"{path}.bn2", 1, 1)
        down = f"{path}.downsample.0.weight" in state
        return (y + (layer(x, f"{path}.downsample.0", f"{path}.downsample.1", stride, 0) if down else x)).relu()

    images = torch.randn(1, 3, 64, 64)
    x = functional.max_pool2d(layer(images, "conv1", "bn1", 2, 3).relu(), 3, 2, 1)
    for stage, given in enumerate(network.backbone.eval()(images)):
        x = block(block(x, f"layer{stage + 1}.0", 2 if stage else 1), f"layer{stage + 1}.1", 1)
        torch.testing.assert_close(given, x)


def test_without_a_network_it_says_what_to_fetch_from_where_to_which_path(hub):
    [line] = backbone_problems(model_of("det_resnet50"))
    path, url = hub / "resnet50-0676ba61.pth", "https://download.pytorch.org/models/resnet50-0676ba61.pth"
    assert line == (
        f"model.backbone.pretrained: there is no {path}, and {url} cannot be fetched (<urlopen error no network here>)"
        f"; fetch it where there is a network, and copy it to {path}"
    )
    assert list(hub.iterdir()) == []


WRONG = [
    (
        model_of("det_mobilenet_v3", bottleneck_params=Bottlenecks(se_version="SqueezeExciteV2")),
        [
            "model.backbone.alpha: torchvision has weights of mobilenet_v3_large with 1.0 alone, got 0.5; type",
            "model.backbone.bottleneck_params.se_version: torchvision has weights of mobilenet_v3_large with Squ",
        ],
    ),
    (model_of("det_resnet18", width=16), ["model.backbone.width: torchvision has weights of resnet18 with 64 alone"]),
    (
        model_of("det_mobilenet_v3_enhance"),
        ["model.backbone.pretrained: there are no published weights of det_mobilenet_v3_enhance, but of det_"],
    ),
    (
        model_of("det_resnet18", "https://download.mindspore.cn/a/resnet-1.ckpt"),
        ["model.backbone.pretrained: https://download.mindspore.cn/a/resnet-1.ckpt holds weights of MindSpore, which "],
    ),
    (model_of("det_resnet18", "gone.pth"), ["model.backbone.pretrained: there are no weights gone.pth; name a file"]),
]


@pytest.mark.parametrize(
    ("model", "messages"), WRONG, ids=[f"{model.backbone.name}{at}" for at, (model, _) in enumerate(WRONG)]
)
def test_weights_that_cannot_be_had_are_said_in_a_line_each(model, messages, hub):
    lines = backbone_problems(model)
    assert len(lines) == len(messages)
    for line, message in zip(lines, messages, strict=True):
        assert line.startswith(message)


def test_a_file_of_another_network_is_refused_whole(hub):
    state = torchvision_resnet("basic", (2, 2, 2, 2))
    del state["layer2.0.conv1.weight"]
    state["layer1.0.conv1.weight"] = torch.zeros(64, 64, 1, 1)
    torch.save(state | {"layer9.weight": torch.zeros(1)}, hub / RESNET18.file)
    network = network_of(model_of("det_resnet18"))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    with pytest.raises(UsageError) as error:
        begin(model_of("det_resnet18"), network)
    assert str(error.value) == (
        "resnet18-f37072fd.pth is no state of torchvision's resnet18: it lacks layer2.0.conv1.weight; it has besides "
        "layer9.weight; it has of another shape layer1.0.conv1.weight [64, 64, 1, 1], expected [64, 64, 3, 3]"
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    (hub / RESNET18.file).write_bytes(b"broken")
    with pytest.raises(CheckpointError, match=r"resnet18-f37072fd.pth cannot be read .*; delete it to have it fetched"):
        begin(model_of("det_resnet18"), network)


def test_a_file_that_is_fetched_is_kept_and_read_by_all(hub, monkeypatch):
    asked = []

    def download(url, path, hash_prefix, progress):
        asked.append((url, hash_prefix))
        torch.save({}, path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    model = model_of("det_resnet18")
    assert backbone_problems(model) == backbone_problems(model) == []
    assert asked == [("https://download.pytorch.org/models/resnet18-f37072fd.pth", "f37072fd")]
    assert [path.name for path in hub.iterdir()] == ["resnet18-f37072fd.pth"]


def test_weights_of_the_whole_network_come_after_those_of_its_backbone(hub, tmp_path):
    torch.save(torchvision_resnet("basic", (2, 2, 2, 2)), hub / RESNET18.file)
    model = model_of("det_resnet18")
    trained = network_of(model)
    torch.save(trained.state_dict(), tmp_path / "trained.pth")
    whole = Model(**{**vars(model), "pretrained": str(tmp_path / "trained.pth")})
    assert network_problems(whole) == []
    network = network_of(model)
    begin(whole, network)
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in network.state_dict().items())
    [line] = network_problems(Model(**{**vars(model), "pretrained": "https://x.org/dbnet-1.ckpt"}))
    assert line.startswith(
        "model.pretrained: https://x.org/dbnet-1.ckpt holds weights of MindSpore, which cannot be rea"
    )
    assert line.endswith("type -o model.pretrained=null to begin with random numbers")
