"""The searches: from what may be chosen to what is chosen."""
