"""What is said on the wire: topology, plans, reports, drift, and the subjects they travel on.

Only msgspec and the standard library are imported here. No I/O, no clock, no knowledge of how a kernel
or a broker works: a change here is a change of the contract.
"""
