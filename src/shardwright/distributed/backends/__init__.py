"""Process groups beside those that torch ships."""
