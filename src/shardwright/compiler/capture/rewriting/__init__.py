"""What rewrites of a captured graph share, and what is known of its values at capture."""
