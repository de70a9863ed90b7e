"""Which machines there are, said in whatever way, and what is known of them."""
