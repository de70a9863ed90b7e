"""What a job is asked to be: the words of the command line, and the values that they come to."""
