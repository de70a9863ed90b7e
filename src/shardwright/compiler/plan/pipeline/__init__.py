"""Plans with pipeline stages: groups of ranks that each compute a stretch of the graph, one microbatch at a time."""
