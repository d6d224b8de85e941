"""Local updates in elastic jobs: what a rank gets that joins later, and averages of sites."""
