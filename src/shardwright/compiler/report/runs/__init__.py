"""What a job has done, from what its ranks told: on a page for a browser."""
