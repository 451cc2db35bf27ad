"""Plan → kernel, as units of one transaction. `steps` has the order, `turn` makes and undoes, `service` is the loop around them."""
