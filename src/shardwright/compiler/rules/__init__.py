"""The rules of operators: one line of notation per operator says how it may be split."""
