"""How any service runs: settings, NATS, retries, health, metrics, logging, errors. Nothing here knows what a plan means."""
