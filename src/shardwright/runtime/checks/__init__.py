"""What is checked around each step of a model, a class for each check, so that no step gives wrong numbers."""
