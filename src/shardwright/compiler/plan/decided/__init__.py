"""The decisions of a plan, and what follows from them: what each device holds, what a step costs, how two differ."""
