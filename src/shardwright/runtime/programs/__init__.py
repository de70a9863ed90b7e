"""The programs of a model: planned, prepared, run; and the state that they work on."""
