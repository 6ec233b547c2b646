"""Roles, the rule that says which of them train, and the verdict on every position.

A position is a token of a sequence or a time step of an episode. Its role is written where the position is born, from
what the writer knows (a length, a finish reason, an author), never from the value of a token: a pad id can be sampled,
a stop id can stand in a prompt, and pad and stop are often the same id.

    ids        7   9   4   2   2   2          2 is both the pad and the stop id
    roles      P   C   C   S   .   .          P prompt, C content, S stop, . pad
    eligible   0   1   1   1   0   0          content + stop
    eligible   0   1   1   0   0   0          content alone
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from rolecall.maths.checks import check_bool, check_shape
from rolecall.maths.codes import Role as Role
from rolecall.maths.codes import Verdict as Verdict

_BY_ROLE = {
    Role.PAD: Verdict.PADDING,
    Role.PROMPT: Verdict.GIVEN,
    Role.CONTENT: Verdict.OBSERVED,  # only when the rule leaves content out; else the position is eligible
    Role.STOP: Verdict.STOP_UNTRAINED,  # likewise
    Role.OBSERVATION: Verdict.OBSERVED,
    Role.NO_CHOICE: Verdict.NO_CHOICE,
    Role.AFTER_END: Verdict.AFTER_END,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainRule:
    """Which roles train. Only what the policy chose can: content and the choice to stop."""

    content: bool = True
    """Train the answer. Off, content is only observed."""
    stop: bool = True
    """Train the choice to end the turn."""

    def eligible(self, roles: UInt8[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Positions that may train, known before anything is scored. Reward positions and GAE use this."""
        return ((roles == Role.CONTENT) & self.content) | ((roles == Role.STOP) & self.stop)

    def verdicts(
        self,
        roles: UInt8[Tensor, "batch time"],
        *,
        bad_record: Bool[Tensor, "batch"] | Bool[Tensor, "batch time"] | None = None,
        reward_failed: Bool[Tensor, "batch"] | None = None,
        replay_observed: Bool[Tensor, "batch"] | None = None,
        blackout: Bool[Tensor, "batch time"] | None = None,
        truncated: Bool[Tensor, "batch"] | None = None,
        flat_group: Bool[Tensor, "batch"] | None = None,
    ) -> UInt8[Tensor, "batch time"]:
        """One verdict per position: the role's own reason where it is not eligible, else the first fact that holds in
        the order of the arguments, else TRAINED.

        Pass `truncated` and `flat_group` only if the recipe leaves such sequences out. Whitening, losses, denominators
        and pictures use `verdicts == Verdict.TRAINED`.
        """
        table = torch.tensor([_BY_ROLE[role] for role in Role], dtype=torch.uint8, device=roles.device)
        facts = {
            Verdict.BAD_RECORD: bad_record,
            Verdict.REWARD_FAILED: reward_failed,
            Verdict.REPLAY_OBSERVED: replay_observed,
            Verdict.BLACKOUT: blackout,
            Verdict.TRUNCATED: truncated,
            Verdict.FLAT_GROUP: flat_group,
        }
        verdict = torch.full_like(roles, Verdict.TRAINED)
        for code, fact in reversed(facts.items()):  # the first fact wins, so it is written last
            if fact is not None:
                name, per_row = code.name.lower(), fact.dim() == 1
                check_bool(**{name: fact})
                expected = roles.shape[:1] if per_row else roles.shape
                check_shape(tuple(expected), like="the batch" if per_row else "roles", **{name: fact})
                verdict = torch.where(fact[:, None] if per_row else fact, int(code), verdict)
        return torch.where(self.eligible(roles), verdict, table[roles.long()])


def response_roles(
    lengths: Int[Tensor, "batch"], stopped_by_id: Bool[Tensor, "batch"], *, width: int
) -> UInt8[Tensor, "batch width"]:
    """Roles of sampled answers from what the engine knows: how long each is, and whether a stop id ended it.

    `lengths` counts the stop token. An answer cut off by a limit or ended by a stop string has content only.

        lengths 3, stopped  ->  C C S .        lengths 3, not stopped  ->  C C C .
    """
    check_shape(tuple(lengths.shape), like="lengths", stopped_by_id=stopped_by_id)
    check_bool(stopped_by_id=stopped_by_id)
    _check_lengths(lengths, width)
    if bool((stopped_by_id & (lengths == 0)).any()):
        raise ValueError(
            "an answer that was stopped by an id has at least that one token: lengths count the stop token"
        )
    position = torch.arange(width, device=lengths.device)
    inside = position < lengths[:, None]
    stop = stopped_by_id[:, None] & (position == lengths[:, None] - 1)
    roles = torch.where(inside, int(Role.CONTENT), int(Role.PAD))
    return torch.where(stop, int(Role.STOP), roles).to(torch.uint8)


def roles_of_ids(
    ids: Int[Tensor, "batch time"], *, stop_ids: Collection[int], lengths: Int[Tensor, "batch"] | None = None
) -> UInt8[Tensor, "batch time"]:
    """Roles of answers that come from elsewhere as bare ids: content up to the first stop id, AFTER_END after it.

    This is the one place that looks at token values, and only at the first stop id of an answer. Pass `lengths` where
    they are known: positions at or beyond them are PAD, and a pad id inside is content. Without them an answer that
    never stops is content to the end of its row.
    """
    if not stop_ids:
        raise ValueError("stop_ids is empty: pass the model's stop ids, or use response_roles with the known lengths")
    is_stop = torch.isin(ids, torch.tensor(sorted(stop_ids), dtype=ids.dtype, device=ids.device))
    inside = torch.ones_like(is_stop)
    if lengths is not None:
        check_shape(tuple(ids.shape[:1]), like="the batch", lengths=lengths)
        _check_lengths(lengths, ids.shape[1])
        inside = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    stops_so_far = (is_stop & inside).cumsum(dim=1)
    first_stop = is_stop & inside & (stops_so_far == 1)
    roles = torch.where(stops_so_far == 0, int(Role.CONTENT), int(Role.AFTER_END))
    roles = torch.where(first_stop, int(Role.STOP), roles)
    return torch.where(inside, roles, int(Role.PAD)).to(torch.uint8)


def episode_roles(
    filled: Bool[Tensor, "batch time"],
    terminated: Bool[Tensor, "batch time"],
    truncated: Bool[Tensor, "batch time"] | None = None,
) -> UInt8[Tensor, "batch time"]:
    """Roles of the time steps of recorded episodes: CONTENT up to and with the step that ended it, AFTER_END after it.

    Cumulative, so a flag that is 0 again later brings nothing back; a flag on a slot that is not filled says nothing.
    The last filled slot of an episode without an end flag holds the observation to bootstrap from, not an action, and
    is AFTER_END too. A row without steps is PAD.

        filled      1 1 1 1 1 1 1         filled      1 1 1 1 0
        terminated  0 0 0 1 0 0 0         terminated  0 0 0 0 0      (cut off by a limit, flag not recorded)
        roles       C C C C > > >         roles       C C C > >
    """
    check_shape(tuple(filled.shape), like="filled", terminated=terminated, truncated=truncated)
    check_bool(filled=filled, terminated=terminated, truncated=truncated)
    if bool((filled[:, 1:] & ~filled[:, :-1]).any()):
        raise ValueError("filled must be a run of True from step 0: an episode cannot have holes")
    end = filled & (terminated if truncated is None else terminated | truncated)
    ends_before = end.cumsum(dim=1) - end.long()
    last_filled = filled & ~torch.nn.functional.pad(filled[:, 1:], (0, 1))
    bootstrap_slot = last_filled & ~end.any(dim=1, keepdim=True)
    acts = filled & (ends_before == 0) & ~bootstrap_slot
    roles = torch.where(acts, int(Role.CONTENT), int(Role.AFTER_END))
    return torch.where(filled.any(dim=1, keepdim=True), roles, int(Role.PAD)).to(torch.uint8)


def _check_lengths(lengths: Int[Tensor, "batch"], width: int) -> None:
    if lengths.numel() and (int(lengths.min()) < 0 or int(lengths.max()) > width):
        raise ValueError(f"lengths must lie in 0..{width} (the width), got {int(lengths.min())}..{int(lengths.max())}")
