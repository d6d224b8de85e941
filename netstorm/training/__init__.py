"""What both frontends need to train and no framework knows: frontends adapt tensors and hooks. Pure."""
