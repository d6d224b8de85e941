"""Observability of a process: counters, dropped messages, logging, traces, and a web server for metrics."""
