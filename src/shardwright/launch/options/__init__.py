"""The options of a job: the words of the command line, and the values that they come to."""
