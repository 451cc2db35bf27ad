"""Kernel → drift. Comparison is pure (`compare`); `service` is the loop around it. Never writes to the kernel."""
