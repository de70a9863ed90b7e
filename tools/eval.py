"""Evaluate a checkpoint: ``python tools/eval.py --config FILE.yaml -o eval.ckpt_load_path=PATH``."""

from shardwright.cli import run
from shardwright.cli.texts import evaluate

if __name__ == "__main__":
    run(evaluate)
