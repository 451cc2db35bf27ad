"""Topology to plans: pure, deterministic, and at the cost of what changed.

A host's plan is made of parts, each the contribution of one topology object: `gateway` and `node` build them, `parts` says which part
depends on which object and puts them together. A new kind of rule is a new object in one part; nothing else changes.
"""

from services.planner.compile.parts import Compiler, compile_all, compile_host

__all__ = ["Compiler", "compile_all", "compile_host"]
