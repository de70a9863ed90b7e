"""Reading the parts that a rank needs, checked."""
