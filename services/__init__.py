"""The services, and what they are made of: runtime ← kernel ← planner, applier, auditor ← cli. Services never import each other."""
