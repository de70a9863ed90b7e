"""What happens while a job runs: the world, the training callable, loaders."""
