"""From Python to an exported program: what is traced, what is refused, which line it comes from."""
