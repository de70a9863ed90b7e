"""What ranks have told of their steps, read again: while the job runs, and afterwards."""
