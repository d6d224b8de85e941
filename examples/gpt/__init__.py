"""A small GPT and its text: what `torch_gpt.py` and `torch_hsdp.py` share. Plain PyTorch."""
