"""The state of a whole run, and putting it back."""
