"""The lab: a whole mesh on one machine, each host and pod in a network namespace, joined by a router in the middle.

What is pure (``layout``, ``expected``) knows no kernel; ``namespaces``, ``wiring`` and ``probe`` know no NATS; ``supervisor`` joins them.
No planning and no encryption here: the services do that, and the lab only gives them hosts to do it on.
"""
