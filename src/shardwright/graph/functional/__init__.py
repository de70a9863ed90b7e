"""Makes an exported graph functional, and takes composite operators apart, node by node where that is certain."""
