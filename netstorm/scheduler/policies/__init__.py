"""When a policy is formed, how it is judged, and whether it is taken. Pure."""
