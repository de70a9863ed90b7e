"""Start processes: hosts, environments, the local launcher, logs. Standard library alone."""
