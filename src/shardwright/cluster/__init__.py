"""Measuring the machines of a cluster, and describing them in rank tables, outside of a job."""
