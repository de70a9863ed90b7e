"""The jobs that run on hosts, whoever launched them from wherever: found, and ended."""
