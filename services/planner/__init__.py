"""Topology → plans. Admission, allocation and compilation are pure functions of values; `service` is the loop around them."""
