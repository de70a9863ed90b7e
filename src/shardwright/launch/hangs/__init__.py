"""The hang of a job: where each rank is, and which one holds the others up."""
