"""Small settings for the tests of value-aware approximation."""

from __future__ import annotations

from papers.value_aware.config import ValueAwareConfig

WORDS = list("abcdefghijklmnopqrs")
CONFIG = ValueAwareConfig(
    kernels=("exp", "poly"),
    lm_layers=1,
    lm_width=6,
    lm_heads=2,
    lm_length=17,
    lm_batch=3,
    lm_steps=2,
    lm_context=11,
    lm_r=(1, 4, 17),
    mlm_short=13,
    mlm_long=29,
    mlm_tokens=58,
    mlm_steps=2,
    mlm_r=(1, 5, 29),
    mlm_lsh=((4, 2),),
    between_r=(2,),
    between_rows=1,
    sweep_every=2,
    curve_points=1,
    eval_batch=5,
)

LINES = [" = A title = \n", " \n", " The cat <unk> sat . \n", " It @-@ sat . \n", " = Other = \n", " the END \n"]
