"""What MXNet's and PyTorch's frontends need to train and neither knows: they adapt tensors, hooks. Pure."""
