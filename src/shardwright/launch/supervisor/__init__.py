"""The process above the ranks of one host, which starts, binds, watches and ends them."""
