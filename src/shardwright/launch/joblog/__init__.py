"""What is written about a job and read again: its folder, logs, failures and reports."""
