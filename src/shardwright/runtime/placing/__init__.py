"""The tensors of a model are brought to the devices, and given values where they have none."""
