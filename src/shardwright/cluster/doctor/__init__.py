"""The search for obstacles to a job on this machine or on several, with the lines that remove them."""
