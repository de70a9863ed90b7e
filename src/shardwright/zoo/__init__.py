"""Models that the configurations of the repository train. They are plain ``nn.Module``s and know nothing of ranks."""

from shardwright.zoo.gpt import GPT
from shardwright.zoo.perceptron import Perceptron, TwoMatmuls
from shardwright.zoo.resnet import ResNet, resnet18, resnet50

__all__ = ["GPT", "Perceptron", "ResNet", "TwoMatmuls", "resnet18", "resnet50"]
