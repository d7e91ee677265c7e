"""Which units will be needed next, learned from the order in which they were needed before. Pure.

After every event the last few are looked up among what followed the same few events before; the longest match wins. There
are no cycles to find and nothing to reset: a branch, an evaluation in between or another order of modules is one wrong or
missing guess and then known (ZeRO-Infinity, SC'21, section 5.1.2: the dynamic prefetcher).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

_LONGEST = 3
"""Events of context: enough to tell the two uses of a tied weight, or of a module called twice, apart."""


class OrderPredictor:
    """Predicts the next events of a sequence from its past.

    Memory is bounded by the number of different contexts, which is that of the model's branches.
    """

    def __init__(self) -> None:
        self._recent: deque[Hashable] = deque(maxlen=_LONGEST)
        self._following: dict[tuple[Hashable, ...], Hashable] = {}

    def observe(self, event: Hashable) -> None:
        """Note what happened."""
        recent = tuple(self._recent)
        for length in range(1, len(recent) + 1):
            self._following[recent[-length:]] = event
        self._recent.append(event)

    def predict(self, count: int) -> list[Hashable]:
        """The next `count` events, fewer where the past says nothing."""
        context = list(self._recent)
        found: list[Hashable] = []
        while len(found) < count:
            following = self._look_up(context)
            if following is None:
                break
            found.append(following)
            context = [*context[-(_LONGEST - 1) :], following]
        return found

    def _look_up(self, context: list[Hashable]) -> Hashable | None:
        for length in range(len(context), 0, -1):
            following = self._following.get(tuple(context[-length:]))
            if following is not None:
                return following
        return None
