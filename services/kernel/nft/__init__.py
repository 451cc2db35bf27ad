"""nftables on one host: rendering to text, listing, the libnftables engine, the kernel as its own normaliser.

All tables are family inet and named ``meshmark.*``. No other table is listed or written, and no ruleset is ever flushed.
"""
