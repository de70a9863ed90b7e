"""What a cluster is asked and told outside of a job."""
