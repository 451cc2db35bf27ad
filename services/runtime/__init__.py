"""How any service runs: settings, NATS, retries, health, metrics, logging, errors; and how a plan arrives (not what it means)."""
