"""Makes an exported graph functional, and refuses changes in place that would be lost by that."""
