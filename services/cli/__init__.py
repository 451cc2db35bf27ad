"""The command ``meshmark``, and the lab."""
