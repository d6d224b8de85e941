"""The general node: chunks, rounds, the replicated store, and the runtime that drives them."""
