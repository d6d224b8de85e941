"""Rounds when nodes leave a job and join it: results kept for others, and changes of the view."""
