"""Shows what the ranks of a job do, while it runs."""
