"""Data sets, what is done to their images, and the order in which ranks read them."""
