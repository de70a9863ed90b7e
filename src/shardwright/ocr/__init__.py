"""Text detection (DBNet) and recognition (CRNN), trained as a configuration file says."""
