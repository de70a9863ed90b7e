"""Evaluate a checkpoint: ``python tools/eval.py --config FILE.yaml -o eval.ckpt_load_path=PATH``."""

from shardwright.cli.texts import run_evaluation

if __name__ == "__main__":
    run_evaluation()
