"""Pages for a browser: their style, and how one file is made of what they are told."""
