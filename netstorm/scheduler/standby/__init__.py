"""Standby schedulers: how one takes over a job whose scheduler is gone, from what its nodes report. Pure."""
