"""The searches: from a space of choices to the choice with the least cost."""
