"""``meshmark doctor``: whether meshmark can work on this host, and whom it would meet there.

`abilities` and `collisions` judge a survey of the kernel (``services.kernel.survey``) and are pure; `owners` knows who uses which marks;
`command` gathers and prints.
"""
