"""Plans for people and programs: a page of text, a table beside known plans, JSON, and a page for a browser."""
