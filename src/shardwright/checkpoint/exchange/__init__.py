"""Plain formats of others, in and out."""
