"""The commands of the laboratory: `plan`, `simulate`, `wan` and `bench`."""
