"""Pure maths on tensors: roles, reductions, returns, advantages, KL, shaping and losses.

Functions here take tensors and numbers and return tensors. They import torch, jaxtyping and the standard library only.
Tensors are [batch, time] unless a signature says otherwise; `mask` is bool and True means "counts"; results are 0 where
the mask is False, and whatever an input holds there (NaN and inf included) reaches neither the value nor the gradient.
"""
