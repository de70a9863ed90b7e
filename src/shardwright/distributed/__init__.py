"""Process groups: the world of ranks, its groups and backends, and agreement between ranks."""
