"""What a scheduler writes down so that another process can take its job over. Pure."""
