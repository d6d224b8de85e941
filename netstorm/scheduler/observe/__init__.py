"""What people and monitoring systems see of a job: snapshots, JSON, metrics. Pure."""
