"""Links that have failed while both of their ends are alive: suspicions, detours, recovery. Pure."""
