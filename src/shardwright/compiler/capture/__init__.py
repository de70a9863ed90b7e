"""From a module, a loss function and a sample batch to a graph of operators."""
