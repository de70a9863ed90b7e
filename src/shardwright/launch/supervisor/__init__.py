"""What stands above the ranks of one host: starting, binding, watching and ending them."""
