"""What a job is asked to be: its options, as values."""
