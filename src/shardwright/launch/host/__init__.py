"""What every process of a job shares: the protocol, processes, the program, staged files."""
