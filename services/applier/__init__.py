"""Plan → kernel, as units of one transaction. The order of steps is in `steps`, making and undoing them in `turn`, the loop in `service`."""
