"""`python -m shardwright`, and so `shardwright launch -n 8 -m shardwright train ...`."""

from shardwright.cli import main

if __name__ == "__main__":
    main()
