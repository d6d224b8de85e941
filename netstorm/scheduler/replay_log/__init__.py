"""The replay log: what a scheduler writes down so that another process can take over its job. Pure."""
