"""Images of texts: read, prepared for networks, and drawn."""
