"""The `isomodels` command."""
