"""What of a program is compiled: the operators between its collectives."""
