"""NetStorm's decoders as fuzzing takes them (`tests/fuzz`, `security/fuzz.py`), each with valid inputs."""
