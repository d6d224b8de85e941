"""Operations that users submit, and the instructions of a node for its driver. Pure."""
