"""The methods of weft: one folder for each way to change a training.

A folder names its `BUNDLE` (`weft.bundles.Bundle`). No lower room imports it: rooms look up contributions.
"""
