"""How one emulated link behaves: by the kernel's queueing disciplines, or by a relay process."""
