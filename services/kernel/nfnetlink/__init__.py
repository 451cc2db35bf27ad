"""The nfnetlink engine: transactions as netlink messages of our own, sent to the kernel without libnftables.

Values become bytes (`values`, `selectors`, `expressions`, `forms`, `templates`, `rules`, `elements`, `sets`, `batch`), one socket sends
them (`exchange`), and `engine` puts it together. Of a chain that changes only the rules that differ are written (`edits`), by what is
known of it (`chains`, `sameness`). Reading for others is not done here. What cannot be said here is `Inexpressible`, and goes to
libnftables.
"""
