"""What rolecall, TRL, verl and OpenRLHF offer of the interface. The last three are imported only where installed."""

from typing import Final

NAN: Final = (
    "robustness: it multiplies by the mask, and NaN * 0 is NaN; inputs must be replaced by `where` before arithmetic."
)
FORBIDDEN: Final = (
    "bug where logits are masked with -inf: it adds softmax * logits, and 0 * -inf is NaN; p log p is 0 at p = 0."
)
"""Why cases differ in more than one of them."""
