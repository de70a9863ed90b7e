"""From what networks give to texts, and how many of these are right."""
