"""What the scripts here share."""
