"""The process group of PyTorch's backend `netstorm`: collectives over trees, messages over the fastest
paths.
"""
