"""What a host's kernel can do, and what others hold in it. Reads, never writes, and loads no module.

`values` is what a survey says. `gather` makes one of everything, for ``meshmark doctor``; `in_use` looks at the numbers that others use,
for reports. `modules`, `probes`, `foreign`, `netfilter`, `ports` and `devices` each look at one part. Whether something that was found is
good or bad is not decided here.
"""
