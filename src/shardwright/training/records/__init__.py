"""The numbers of a run in files and trackers: losses, rates and validations, step by step."""
