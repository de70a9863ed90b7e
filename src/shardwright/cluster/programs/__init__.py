"""Programs of ours on several hosts, which answer one request after the other."""
