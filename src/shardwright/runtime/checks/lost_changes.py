"""Refuses writes to a copy of a split parameter, where the script meant the parameter."""

from __future__ import annotations

from shardwright.compiler.mesh.changed import refuse_lost_changes


class LostChanges:
    """Refuses what was written to a view of several ranks' parts, which is a copy.

    Costs a look at a flag; a collective of objects where the script has looked into split tensors since the last step.
    """

    def before(self) -> None:
        """Raise `UsageError` on all ranks, which come here together, where something is lost on one of them."""
        refuse_lost_changes()
