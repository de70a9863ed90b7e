"""What a configuration may ask for: its sections, their keys, and the choices in them."""
