"""Models, and training them as a configuration file says."""

from shardwright.training.zoo.models.gpt import GPT
from shardwright.training.zoo.models.perceptron import Perceptron, TwoMatmuls
from shardwright.training.zoo.models.resnet import ResNet, resnet18, resnet50

__all__ = ["GPT", "Perceptron", "ResNet", "TwoMatmuls", "resnet18", "resnet50"]
