"""Reports: handlers of a run's events. Each is called with every event, and knows nothing of the others."""
