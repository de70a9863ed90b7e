"""Find and read the texts in images, and draw them:

python tools/predict.py --det-config FILE.yaml --rec-config FILE.yaml --out DIR IMAGE...
"""

from shardwright.cli import run
from shardwright.cli.texts import predict

if __name__ == "__main__":
    run(predict)
