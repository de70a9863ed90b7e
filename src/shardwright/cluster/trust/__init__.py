"""Logins between hosts without a password: made, proved pair by pair, and undone."""
