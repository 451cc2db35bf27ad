"""Plan → kernel, as units of one transaction. The order of steps is in `steps`, the undo in `journal`, the loop in `service`."""
