"""How any service runs: settings, NATS, retries, health, metrics, logging, errors. How a plan arrives is here (`plans`), what it means is not."""
