"""The `netstorm` command: one module a subcommand."""
