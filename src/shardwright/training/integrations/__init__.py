"""Training loops of others over a model that runs on all ranks; each file needs the package that it is for."""
