"""The graphs of a model's steps: what each depends on, and when one follows from another."""
