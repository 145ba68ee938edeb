"""Sun and Marasović (2021), Effective Attention Sheds Light On Interpretability (Effective)."""

PAPER = "Effective"
CITATION = "Sun and Marasović (2021), Effective Attention Sheds Light On Interpretability"
