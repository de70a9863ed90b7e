"""The code that every process of a job shares: the protocol, processes, the program, staged files."""
