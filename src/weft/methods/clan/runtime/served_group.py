"""`ServedGroup`: the messages between replicas and the servers that add their gradients up."""

from __future__ import annotations

import torch

from weft.sync.base import Group


class ServedGroup:
    """The replicas of a stage, and behind them all servers, in a group for each direction.

    One side gives what the other side takes, in calls that pair up: `to_servers` with `from_replicas`, and
    `to_replicas` with `from_servers`.

    Attributes:
        there: the group of what goes to servers.
        servers, replicas: their numbers.
        server: the number of this rank among the servers; negative on a replica.
    """

    def __init__(self, there: Group, back: Group, servers: int) -> None:
        self.there, self._back = there, back
        self.servers, self.replicas = servers, there.size - servers
        self.server = there.place - self.replicas
        self._nothing = [0] * there.size
        self._of_servers = [0] * self.replicas + [1] * servers
        self._of_replicas = [1] * self.replicas + [0] * servers

    def to_servers(self, given: torch.Tensor) -> None:
        """Give server s the row s of `given`, shape (servers, n)."""
        _exchange(self.there, given[:0], given, self._nothing, self._of_servers)

    def from_replicas(self, taken: torch.Tensor) -> None:
        """Fill `taken`, shape (replicas, n), with a row of each replica."""
        _exchange(self.there, taken, taken[:0], self._of_replicas, self._nothing)

    def to_replicas(self, given: torch.Tensor) -> None:
        """Give each replica all of `given`, shape (n,)."""
        each = given.expand(self.replicas, -1)
        _exchange(self._back, each[:0], each, self._nothing, self._of_replicas)

    def from_servers(self, taken: torch.Tensor) -> None:
        """Fill `taken`, shape (servers, n), with a row of each server."""
        _exchange(self._back, taken, taken[:0], self._of_servers, self._nothing)


def _exchange(
    group: Group, taken: torch.Tensor, given: torch.Tensor, taken_rows: list[int], given_rows: list[int]
) -> None:
    if taken.shape[1]:
        group.all_to_all_rows(taken, given, taken_rows, given_rows)
