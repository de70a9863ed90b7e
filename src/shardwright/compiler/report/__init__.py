"""Reports for people: tables, dumps, pages."""
