"""The steps of optimizers on split parameters: what torch is told for them, and what ranks tell each other of them."""
