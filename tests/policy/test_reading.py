"""What a model does to its raw logits is found out by a probe, or the model is refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rolecall.errors import UserError
from rolecall.policy.reading import logit_map

IDS = torch.tensor([[3, 1, 4, 1, 5]])


class Changed(LlamaForCausalLM):
    """A Llama that does something more to its logits."""

    change = staticmethod(lambda logits: logits)

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


def changed(change, **settings):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = Changed(LlamaConfig(**sizes, num_attention_heads=2, **settings)).eval()
    model.change = change
    return model


@pytest.mark.parametrize(
    ("change", "settings", "found"),
    [
        (lambda z: z, {"logit_scale": 0.5, "final_logit_softcapping": 30.0}, (1.0, None)),
        (lambda z: 0.25 * z, {"logit_scale": 0.25}, (0.25, None)),
        (lambda z: z / 4, {"logits_scaling": 4}, (0.25, None)),
        (lambda z: 1.4 * z, {"lm_head_multiplier": 1.4}, (1.4, None)),
        (lambda z: 30 * (z / 30).tanh(), {"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        (lambda z: 3 * (2 * z / 3).tanh(), {"output_logit_soft_cap": 3.0, "logit_scale": 2.0}, (2.0, 3.0)),
    ],
)
def test_a_scale_and_a_cap_are_recognised_by_what_they_do(change, settings, found):
    model = changed(change, **settings)
    before = model(IDS).logits
    assert tuple(logit_map(model)) == found
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda z: z + 1, "in a way that is not known here"),
        (lambda z: 1.1 * z, "in a way that is not known here"),
        (lambda z: z[:, -1:], "no logits of its whole vocabulary for every token"),
        (lambda z: None, "no logits of its whole vocabulary for every token"),
    ],
)
def test_another_change_is_refused(change, why):
    with pytest.raises(UserError, match=why):
        logit_map(changed(change, logit_scale=0.5))
