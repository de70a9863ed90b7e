"""Who am I, and whom do I talk to: the world, its groups, agreement between ranks."""
