"""The general node: the state machine that holds all parts of this package together. Pure."""
