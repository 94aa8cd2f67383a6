"""The report's section about the loads of experts."""

LOADS = "expert_loads"
# Means over layers: the balance loss of all tokens of a step; the most tokens of an expert over their mean,
# less one; and the standard deviation of tokens of experts over their mean.
FIGURES = ("balance_loss", "expert_violation", "expert_variation")
