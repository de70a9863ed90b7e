"""What is in the way of a job on this machine or on several, and what to type."""
