"""A job as what runs it elsewhere, without this launcher: a manifest, a script, a command."""
