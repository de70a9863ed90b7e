"""A job's run as a page for a browser, from what its ranks reported."""
