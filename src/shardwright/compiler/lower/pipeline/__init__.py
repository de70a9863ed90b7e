"""Programs of pipeline stages: microbatches through stretches of operators, forward and backward."""
