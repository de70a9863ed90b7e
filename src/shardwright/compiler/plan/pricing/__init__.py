"""The graph with its rules, and what each choice for a piece of it costs on given hardware."""
