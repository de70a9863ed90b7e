"""What people look at: tables, dumps, pages."""
