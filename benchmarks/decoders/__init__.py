"""The decoders of NetStorm as targets of the fuzzer (`security/fuzz.py`), each with valid inputs."""
