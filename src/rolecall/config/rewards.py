"""What reward functions may do."""

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RewardProcessOptions:
    """What reward functions may do: they run in processes of their own."""

    reward_deadline: float = 60.0
    """Seconds a reward function may take before it is killed and its sample counted as failed."""
    reward_network: bool = False
    """Let reward functions use the network, for a service behind an HTTP address, also one on this machine. `judge:URL` needs no permission."""
    reward_variables: tuple[str, ...] = ()
    """Environment variables that reward functions see in addition to the usual ones (PATH, HOME, caches, thread counts), such as
    OPENAI_API_KEY."""
    reward_cluster: Literal["none", "ray"] = "none"
    """`ray`: those processes run on the machines of a Ray cluster, which must find the functions too (docs/cluster.md)."""

    def reward_limits(self) -> dict[str, Any]:
        """As a reward pool takes them."""
        return {
            "deadline_s": self.reward_deadline,
            "network": self.reward_network,
            "variables": self.reward_variables,
        }
