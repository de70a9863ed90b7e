"""Memory that the ranks of one host share, and collectives in it."""
