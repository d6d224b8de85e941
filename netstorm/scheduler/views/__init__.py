"""Views: who is in a job that nodes may leave and join, and how its rounds go on when that changes."""
