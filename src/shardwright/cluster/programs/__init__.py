"""Programs of ours on several hosts, which are asked one thing after the other."""
