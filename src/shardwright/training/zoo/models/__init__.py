"""The networks that configurations name, each with its options: plain ``nn.Module``s that know nothing of ranks."""
