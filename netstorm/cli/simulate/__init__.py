"""`netstorm simulate`: studies schemes over many networks."""
