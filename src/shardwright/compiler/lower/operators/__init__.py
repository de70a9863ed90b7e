"""Operators on local parts that torch does not have, or has wrong or slow for them: what the programs call."""
