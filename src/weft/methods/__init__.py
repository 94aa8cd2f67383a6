"""What weft can do to a training: one folder for each method.

A folder names its `BUNDLE` (`weft.bundles.Bundle`). Nothing below imports it: rooms ask for contributions.
"""
