"""From a plan to one program per rank."""
