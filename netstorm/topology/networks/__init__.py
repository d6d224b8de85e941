"""Networks: nodes, links, resources; network files; generators."""
