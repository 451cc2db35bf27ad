"""Reading own nftables from the kernel's own messages: no listing, no libnftables.

`dumps` asks, `rules` and `sets` make of the answers what compares (bytes of rules, objects of sets), `words` says a rule to people,
`reading` remembers what it has seen, and `loading` asks for the form of wanted chains. Nothing of a host's is written here.
"""
