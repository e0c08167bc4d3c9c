"""The `shufl` command."""
