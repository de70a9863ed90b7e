"""The record of a job, written and read again: its folder, logs, failures and reports."""
