"""The reports of ranks on their steps, read again: while the job runs, and afterwards."""
