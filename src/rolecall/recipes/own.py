"""The user's own advantage and loss: what they return is checked where it is returned, before anything is trained on it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from rolecall.errors import UserError
from rolecall.maths.reduce import MODES
from rolecall.policy.model import Outputs
from rolecall.recipes.algorithms import Advantage
from rolecall.train.step import Loss, Term
from rolecall.types import Batch


def own_advantage(function: Callable[..., Any], *, returns: bool) -> Advantage:
    """`function`, whose results must have the shape of the batch. `returns`: it must give the critic's targets too."""

    def advantage(batch: Batch) -> Tensor | tuple[Tensor, Tensor]:
        made, shape = function(batch), batch.ids.shape
        advantages, targets = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        well = isinstance(advantages, Tensor) and advantages.shape in (shape[:1], shape)
        if targets is None:
            well = well and not returns
        else:
            well = well and isinstance(targets, Tensor) and targets.shape == shape
        if well:
            return made
        pair = "a pair (advantages, returns [batch, time]) with advantages" if returns else "a tensor"
        raise UserError(
            f"the advantage function {_name(function)} returned {_shown(made)}; it must return {pair} of shape "
            f"[batch] = {[shape[0]]} or [batch, time] = {list(shape)}"
        )

    return advantage


def own_loss(function: Callable[..., Any]) -> Loss:
    """`function`, whose result must be named terms with a value for every position."""

    def loss(outputs: Outputs, batch: Batch) -> Mapping[str, Term]:
        made, shape = function(outputs, batch), batch.ids.shape
        what = f"the loss function {_name(function)}"
        terms = isinstance(made, Mapping) and all(isinstance(term, Term) for term in made.values())
        if not terms or not made:
            raise UserError(
                f"{what} returned {_shown(made)}; it must return {{name: Term}} with a value for every position, such as "
                "{'policy': Term(values=…, mask=trained(batch), mode='token-mean')} (rolecall.train.step), and leave the "
                "mean to `mode`"
            )
        for name, term in made.items():
            for part in ("values", "mask"):
                held = getattr(term, part)
                if not isinstance(held, Tensor) or held.shape != shape:
                    raise UserError(
                        f"{what} returned {_shown(held)} as {part} of the term {name!r}; they must have the shape "
                        f"[batch, time] = {list(shape)}"
                    )
            if term.mode not in MODES:
                raise UserError(f"{what}: the term {name!r} has mode {term.mode!r}; choose one of {', '.join(MODES)}")
        return made

    return loss


def _name(function: Callable[..., Any]) -> str:
    return f"`{getattr(function, '__name__', type(function).__name__)}`"


def _shown(made: Any) -> str:
    """What was returned, in a few words."""
    if isinstance(made, Tensor):
        return f"a tensor of shape {list(made.shape)}" if made.dim() else "a single number (a tensor of shape [])"
    if isinstance(made, tuple):
        return f"a tuple of {len(made)} ({', '.join(_shown(x) for x in made[:3])})"
    if isinstance(made, Mapping) and made:
        name, value = next(iter(made.items()))
        return f"a {type(made).__name__} in which {name!r} is {_shown(value)}"
    return f"{'an empty' if isinstance(made, Mapping) else 'a'} {type(made).__name__}"
