"""The networks of text detection and recognition: published sizes, and any plan gives what one device gives."""

import pytest
import torch

from rows import slow
from shardwright.errors import UsageError
from shardwright.ocr.networks.crnn import CRNN, VGG7, ResNet34
from shardwright.ocr.networks.dbnet import DBNet, resnet18_pyramid, resnet50_pyramid
from shardwright.ocr.networks.losses import DetectionLoss, detection_loss, recognition_loss
from shardwright.ocr.networks.mobilenet import BlockStyle, mobilenet_pyramid
from shardwright.ocr.networks.necks import LevelPyramid, ScaleFusion, WeighedPyramid
from whole import like_plain


def parameters(model):
    return sum(p.numel() for p in model.parameters())


# The published 8.72 and 24.48 millions, to the last one.
@pytest.mark.parametrize(("backbone", "count", "steps"), [(VGG7, 8_725_413, 24), (ResNet34, 24_481_029, 25)])
def test_recognisers_have_the_published_size_and_steps(backbone, count, steps):
    with torch.device("meta"):
        model = CRNN(backbone())
        assert parameters(model) == count
        images = torch.empty(2, 3, 32, 100)
        assert model.backbone(images).shape == (2, 512, 1, steps)
        assert model(images).shape == (2, steps, 37)


HEADS = 2 * (256 * 64 * 9 + 2 * 64 + (64 * 64 * 4 + 64) + 2 * 64 + (64 * 4 + 1))
LEVELS = 4 * 256 * 64 * 9
# name -> pyramid, its parameters without the classes of ImageNet, its channels
PYRAMIDS = {
    "resnet18": (resnet18_pyramid, 11_689_512 - 513_000, [64, 128, 256, 512]),
    "resnet50": (resnet50_pyramid, 25_557_032 - 2_049_000, [256, 512, 1024, 2048]),
    "mobilenet": (mobilenet_pyramid, None, [16, 24, 56, 480]),
}


@pytest.mark.parametrize("name", ["resnet18", "mobilenet", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_detectors_have_the_published_size_and_strides(name):
    make, count, channels = PYRAMIDS[name]
    with torch.device("meta"):
        model = DBNet(make())
        own = parameters(model.backbone)
        assert count is None or own == count
        assert parameters(model) == own + 256 * sum(channels) + LEVELS + HEADS
        features = model.backbone(torch.empty(2, 3, 64, 96))
        assert [tuple(f.shape) for f in features] == [
            (2, c, 64 // stride, 96 // stride) for c, stride in zip(channels, (4, 8, 16, 32), strict=True)
        ]
        assert model.neck(features).shape == (2, 256, 16, 24)
        probability, threshold = model(torch.empty(2, 3, 64, 96))
        assert probability.shape == threshold.shape == (2, 64, 96)
        assert model.eval()(torch.empty(2, 3, 64, 96)).shape == (2, 64, 96)


def fused(backbone, width, channel_attention=True):
    """DBNet++."""
    neck = LevelPyramid(backbone.channels, width, fusion=ScaleFusion(width, channel_attention))
    return DBNet(backbone, neck=neck)


def enhanced(alpha, width):
    backbone = mobilenet_pyramid(alpha, BlockStyle(squeeze=None))
    return DBNet(backbone, neck=WeighedPyramid(backbone.channels, width))


@pytest.mark.parametrize("channel_attention", [True, False])
def test_scale_fusion_weighs_the_levels_as_the_paper_says(channel_attention):
    """By functions of torch alone; DBNet++ with ResNet-50 is as large as published configurations say, 0.15 M more."""
    torch.manual_seed(0)
    fusion = ScaleFusion(32, channel_attention).double()
    parts = list(torch.randn(4, 2, 8, 6, 5, dtype=torch.float64))
    state, convolve = fusion.state_dict(), torch.nn.functional.conv2d
    x = convolve(torch.cat(parts, 1), state["reduce.weight"], state["reduce.bias"], padding=1)
    if channel_attention:
        mean = x.mean((2, 3), keepdim=True)
        x = x + torch.sigmoid(convolve(convolve(mean, state["channels.0.weight"]).relu(), state["channels.2.weight"]))
    place = convolve(x.mean(1, keepdim=True), state["places.0.weight"], padding=1).relu()
    x = x + torch.sigmoid(convolve(place, state["places.2.weight"]))
    weights = torch.sigmoid(convolve(x, state["scales.0.weight"]))
    expected = torch.cat([weights[:, [at]] * part for at, part in enumerate(parts)], 1)
    torch.testing.assert_close(fusion(torch.cat(parts, 1), parts), expected)
    with torch.device("meta"):
        more = parameters(ScaleFusion(256, channel_attention))
    assert more == 256 * 64 * 9 + 64 + (2 * 64 * 16 if channel_attention else 0) + 9 + 1 + 64 * 4


@pytest.mark.parametrize(
    ("out_stages", "channels"),
    [((4, 6, 9, 17), [16, 24, 40, 80]), pytest.param((5, 8, 11, 16), [16, 24, 40, 80], marks=pytest.mark.slow)],
)
def test_stages_of_a_mobilenet_end_where_they_are_told_to(out_stages, channels):
    with torch.device("meta"):
        backbone = mobilenet_pyramid(0.5, out_stages=out_stages)
        found = backbone(torch.empty(1, 3, 64, 96))
    assert backbone.channels == channels
    assert [tuple(f.shape[1:]) for f in found] == [
        (c, 64 // stride, 96 // stride) for c, stride in zip(channels, (4, 8, 16, 32), strict=True)
    ]


@pytest.mark.parametrize(
    "out_stages", [(5, 8, 14), (3, 8, 14, 20), (5, 8, 14, 19), (5, 9, 14, 20), (8, 5, 14, 20), (-1, 1, 2, 3)]
)
def test_stages_of_other_strides_are_refused(out_stages):
    with pytest.raises(UsageError, match=r"model.backbone.out_stages: expected four layers at strides 4, 8, 16 and 32"):
        mobilenet_pyramid(out_stages=out_stages)


def words(rows):
    lengths = torch.arange(rows) % 3 + 1
    return torch.randn(rows, 3, 32, 20), torch.randint(0, 6, (rows, 3)), lengths


def scenes(rows):
    maps = [(torch.rand(rows, 32, 32) < share).double() for share in (0.1, 0.9, 0.5, 0.6)]
    return torch.randn(rows, 3, 32, 32), maps[0], maps[1], 0.3 + 0.4 * maps[2], maps[3]


# name -> (model, loss function, batch of so many rows)
NETWORKS = {
    "vgg7": (lambda: CRNN(VGG7(4), 7, 5), recognition_loss, words),
    "resnet34": (lambda: CRNN(ResNet34(4), 7, 5), recognition_loss, words),
    "fusion": (lambda: fused(resnet18_pyramid(4), 16), detection_loss(DetectionLoss()), scenes),
    "enhanced": (lambda: enhanced(0.1, 16), detection_loss(DetectionLoss(overlap=True)), scenes),
}


@pytest.mark.networks
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["vgg7", *slow("resnet34", "fusion", "enhanced")])
def test_plans_of_text_networks_give_what_one_device_gives(name):
    """Captured, each loss a quotient of sums over all ranks; uneven on 2 ranks."""
    make, loss_fn, batch_of = NETWORKS[name]
    torch.manual_seed(0)
    plans = like_plain(make().train(), loss_fn, batch_of(5), sizes=(2,) if name == "vgg7" else (2, 3), tolerance=1e-9)
    for plan in plans:
        assert plan.graph.unlisted == ()
