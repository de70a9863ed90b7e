"""The machines that there are: how people and launchers name them, and what they say of themselves."""
