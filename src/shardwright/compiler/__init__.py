"""One training step as a graph, a plan and a program: from `Capture` over `Plan` to `LocalProgram`."""
