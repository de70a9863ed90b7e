"""The networks of text detection and recognition: plain ``nn.Module``s that know nothing of ranks."""
