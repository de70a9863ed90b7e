"""The sections of a configuration, their keys, and the choices in them."""
