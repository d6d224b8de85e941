"""`netstorm wan`: an emulated WAN on this machine."""
