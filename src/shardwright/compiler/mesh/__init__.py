"""Named axes, layouts of tensors on them, and redistributions between layouts."""
