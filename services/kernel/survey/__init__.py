"""What a host's kernel can do, and what others hold in it: for ``meshmark doctor``. Reads, never writes, and loads no module.

`values` is what a survey says, `gather` makes one; `modules`, `probes`, `foreign`, `netfilter` and `ports` each look at one part. Whether
something that was found is good or bad is not decided here.
"""
