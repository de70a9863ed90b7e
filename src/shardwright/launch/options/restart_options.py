"""Whether a job that fails begins again: the words of the command line, and the variables that say it to ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.errors import UsageError
from shardwright.launch.options.carrier_facts import UNSAID, CarrierFacts


@dataclass(frozen=True)
class RestartOptions:
    """``limit`` restarts at most, of which ``count`` have been made.

    ``elastic``: a restart does without hosts that are lost, as long as ``min_ranks`` ranks remain.
    """

    limit: int = 0
    elastic: bool = False
    min_ranks: int = 1
    count: int = 0

    @classmethod
    def read(cls, max_restarts: int, elastic: bool, min_ranks: int | None) -> RestartOptions:
        """The restarts that are asked for. Raises `UsageError` for words that contradict each other."""
        if max_restarts < 0:
            raise UsageError(f"--max-restarts {max_restarts} is no number of restarts; type a whole number from 0 on")
        if elastic and max_restarts == 0:
            raise UsageError("--elastic says what a restart may do without; type --max-restarts K too")
        if min_ranks is not None and not elastic:
            raise UsageError(f"--min-ranks {min_ranks} is for jobs that may shrink; type --elastic too")
        if min_ranks is not None and min_ranks < 1:
            raise UsageError(f"--min-ranks {min_ranks} is no number of ranks; type a whole number from 1 on")
        return cls(max_restarts, elastic, 1 if min_ranks is None else min_ranks)

    @property
    def left(self) -> int:
        return self.limit - self.count

    def next(self) -> RestartOptions:
        return replace(self, count=self.count + 1)

    def check(self, ranks: int | None, *, by_table: bool = False, carrier: CarrierFacts = UNSAID) -> None:
        """Raise `UsageError` where the job, of so many ranks where they are known, cannot become smaller."""
        if self.elastic and by_table:
            raise UsageError(
                "--elastic gives ranks other hosts, but a rank table says where each is; type -H HOST:SLOTS,... in "
                "place of --rank-table, or leave --elastic out"
            )
        if self.elastic:
            carrier.refuse("--elastic")
        if ranks is not None and self.min_ranks > ranks:
            raise UsageError(
                f"--min-ranks {self.min_ranks} is more than the {ranks} rank{'s' * (ranks != 1)} of the job; type one "
                f"from 1 to {ranks}"
            )

    def variables(self) -> dict[str, str]:
        """torchelastic's, by which a script may know."""
        return {"TORCHELASTIC_RESTART_COUNT": str(self.count), "TORCHELASTIC_MAX_RESTARTS": str(self.limit)}


ONCE = RestartOptions()
"""The restarts of a job that ends where it fails: none."""
