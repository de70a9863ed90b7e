"""The exceptions that Shardwright raises.

    ShardwrightError            everything below; catch this to catch us
    ├── UsageError              an argument, a file name or a combination that cannot be served
    ├── LaunchError             processes could not be started, or one of them failed
    ├── WorldError              the ranks do not agree, or a peer did not come
    ├── DataError               a data file is missing, short, corrupt, or differs between ranks
    ├── CaptureError            the model cannot be turned into a graph; names the user's line
    ├── PlanError               no plan fits the pins, the mesh or the graph
    │   └── StrategyError       a pin or strategy is impossible for its operator
    ├── TrainingError           a run cannot go on: its loss is not finite
    ├── CheckpointError         a checkpoint cannot be written, is damaged, or does not fit the model
    │   └── DamageError         a file of a checkpoint is missing, short, or not what was written
    └── LoweringError           a plan could not be turned into a local program (a defect of ours)

Every message says what was got, what was expected and, where there is one, what to type.
"""

from __future__ import annotations


class ShardwrightError(Exception):
    """The root of every exception raised on purpose by Shardwright."""


class UsageError(ShardwrightError, ValueError):
    """An argument, a file name or a combination of options that cannot be served."""


class LaunchError(ShardwrightError, RuntimeError):
    """Processes could not be started, or one of them failed."""


class WorldError(ShardwrightError, RuntimeError):
    """The ranks of a job do not agree about it, or a peer did not come in time."""


class DataError(ShardwrightError, ValueError):
    """A data file is missing, short, corrupt, or differs between ranks."""


class CaptureError(ShardwrightError, RuntimeError):
    """The model or loss function cannot be captured as a graph."""


class PlanError(ShardwrightError, ValueError):
    """No plan fits the pins, the mesh or the graph."""


class StrategyError(PlanError):
    """A strategy that is impossible for its operator."""


class TrainingError(ShardwrightError, RuntimeError):
    """A training run cannot go on."""


class CheckpointError(ShardwrightError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit what it is to be loaded into."""


class DamageError(CheckpointError):
    """A file of a checkpoint is missing, short, or not what was written."""


class LoweringError(ShardwrightError, RuntimeError):
    """A plan could not be turned into a local program."""
