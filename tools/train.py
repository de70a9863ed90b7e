"""Train text detection or recognition: ``python tools/train.py --config configs/det/dbnet/db_r50_icdar15.yaml``.

The same as ``shardwright train``. Under mpirun, torchrun or ``shardwright launch`` each process is one rank.
"""

import sys

from shardwright.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    main()
