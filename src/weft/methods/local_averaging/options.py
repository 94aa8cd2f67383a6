"""What local averaging is told: keys of `[sync]`, and options of a plan's `sync`."""

from __future__ import annotations

from pydantic import Field

from weft.describe.plan import Plan
from weft.describe.synchronisation import SyncMethod, sync_options
from weft.describe.toml_table import Count, TomlTable

NAME = "local-averaging"


class LocalAveragingOptions(TomlTable):
    """The keys beside `method = "local-averaging"`."""

    every: Count = Field(description="steps that replicas take by themselves between two averagings")


SYNC = SyncMethod(name=NAME, table=LocalAveragingOptions, local_gradients=True)


def options_of(plan: Plan) -> LocalAveragingOptions | None:
    """What a plan asks of it; None where its replicas agree in another way.

    Raises:
        InputError: for options that it does not have.
    """
    if plan.sync.name != NAME:
        return None
    options = sync_options(NAME, plan.sync.options, "plan: sync.options")
    assert isinstance(options, LocalAveragingOptions), "its own table checks them"
    return options
