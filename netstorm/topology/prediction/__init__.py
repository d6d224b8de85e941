"""How long a policy takes, and the optimum that nothing can beat."""
