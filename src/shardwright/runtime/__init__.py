"""A model runs on all ranks: it is planned, its programs are made and called, its state is stored as they need it."""
