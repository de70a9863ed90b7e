"""What each operator allows: one line of notation per operator."""
