"""What all ranks know about one optimizer's gradients before a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from zero_plugin.grads.norm import NormSummary, merge_partials
from zero_plugin.grads.offload import GradientShards
from zero_plugin.grads.reducer import GradientReducer
from zero_plugin.kernels import NormPartial
from zero_plugin.sharding.control import Control
from zero_plugin.sharding.partition import Block


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One optimizer's gradients, the same on every rank.

    Attributes:
        norm: merged norm partial of the scaled gradients, with the count of non-finite elements; None where nobody asked.
        present: managed indices of the parameters that have a gradient on some rank.
    """

    norm: NormSummary | None
    present: frozenset[int]


class GradientAgreement:
    """Brings ranks to the same gradients and exchanges norms and presence, once for each set of gradients.

    Args:
        control: the ranks.
        reducer: joins outstanding reductions.
        shards: the reduced chunks.
        blocks_of: an optimizer's blocks, in forward order.
        sharded: whether each rank holds only its part of a gradient.
        looks: whether every step looks at the norms; else they are computed for whoever asks, in backward already where the last
            step's were asked for.
    """

    def __init__(
        self,
        control: Control,
        reducer: GradientReducer,
        shards: GradientShards,
        blocks_of: Callable[[int], Sequence[Block]],
        *,
        sharded: bool,
        looks: bool,
    ) -> None:
        self._looks = looks
        self._control = control
        self._reducer = reducer
        self._shards = shards
        self._blocks_of = blocks_of
        self._sharded = sharded
        self._known: dict[int, tuple[int, Summary]] = {}

    def norm(self, optimizer: int) -> NormSummary:
        """The norm of one optimizer's gradients; all ranks call it in the same order."""
        found = self._summarise(optimizer, norm=True).norm
        if found is None:
            raise ValueError(f"the norm of optimizer {optimizer}'s gradients was left out")
        return found

    def for_step(self, optimizer: int) -> Summary:
        """What a step needs to know, with a norm only where steps look at it or somebody asked; all ranks call it."""
        summary = self.summarise(optimizer)
        self._shards.expect_norm(optimizer, wanted=summary.norm is not None)
        return summary

    def summarise(self, optimizer: int) -> Summary:
        """The summary of one optimizer's gradients; all ranks call it in the same order."""
        return self._summarise(optimizer, norm=self._looks)

    def _summarise(self, optimizer: int, *, norm: bool) -> Summary:
        self._reducer.notice_user_writes()
        generation, known = self._known.get(optimizer, (-1, None))
        fresh = generation == self._reducer.local.generation
        if known is not None and fresh and (not norm or known.norm is not None):
            return known
        self._reducer.finalize()
        blocks = self._blocks_of(optimizer)
        found = self._shards.summarise(blocks) if norm else None
        members = [member.index for block in blocks for member in block.parameters]
        present = {index for index in members if self._reducer.local.is_present(index)}
        if self._control.size > 1:
            found, present = self._exchange(found, members, present)
        summary = Summary(norm=found, present=frozenset(present))
        self._known[optimizer] = (self._reducer.local.generation, summary)
        return summary

    def forget(self) -> None:
        """Drop what is known; the gradients are gone."""
        self._known.clear()

    def name_nonfinite(self, optimizers: Sequence[int]) -> str:
        """Which gradients are NaN or infinite, as a clause; names this rank's part only."""
        blocks = [block for number in optimizers for block in self._blocks_of(number)]
        names = self._shards.find_nonfinite(blocks)
        if not names:
            return "a gradient is NaN or infinite in another rank's part"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"the gradient of {', '.join(names[:3])}{more} is NaN or infinite"

    def _exchange(
        self, norm: NormSummary | None, members: Sequence[int], present: set[int]
    ) -> tuple[NormSummary | None, set[int]]:
        flags = torch.tensor(
            [index in present for index in members], dtype=torch.int64, device="cpu"
        )
        if norm is None:
            words, merged = 0, None
            rows = self._control.exchange(flags, label="presence")
        else:
            words = NormPartial.NUM_WORDS
            rows = self._control.exchange(
                torch.cat([norm.to_tensor(), flags]), label="norm and presence"
            )
            partials = [NormPartial.from_tensor(row[:words]) for row in rows]
            # Without sharding every rank holds the whole gradient, and all the same one.
            merged = merge_partials(partials) if self._sharded else partials[0]
        union = torch.stack([row[words:] for row in rows]).sum(dim=0).tolist()
        return merged, {index for index, count in zip(members, union, strict=True) if count}
