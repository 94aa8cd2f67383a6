"""`ServedGroup`: the messages between replicas and the servers that add their gradients up."""

from __future__ import annotations

import torch

from weft.sync.base import Group


class ServedGroup:
    """A group of the replicas of a stage, and behind them of all servers.

    One side gives what the other side takes, in calls that pair up: `to_servers` with `from_replicas`, and
    `to_replicas` with `from_servers`.

    Attributes:
        servers, replicas: their numbers.
        server: the number of this rank among the servers; negative on a replica.
    """

    def __init__(self, group: Group, servers: int) -> None:
        self.servers, self.replicas = servers, group.size - servers
        self.server = group.place - self.replicas
        self._group = group

    def to_servers(self, given: torch.Tensor) -> None:
        """Give server s the row s of `given`, shape (servers, n)."""
        self._exchange(given[:0], given, [0] * self._group.size, self._of_servers)

    def from_replicas(self, taken: torch.Tensor) -> None:
        """Fill `taken`, shape (replicas, n), with a row of each replica."""
        self._exchange(taken, taken[:0], self._of_replicas, [0] * self._group.size)

    def to_replicas(self, given: torch.Tensor) -> None:
        """Give each replica all of `given`, shape (n,)."""
        each = given.expand(self.replicas, -1)
        self._exchange(each[:0], each, [0] * self._group.size, self._of_replicas)

    def from_servers(self, taken: torch.Tensor) -> None:
        """Fill `taken`, shape (servers, n), with a row of each server."""
        self._exchange(taken, taken[:0], self._of_servers, [0] * self._group.size)

    def _exchange(
        self, taken: torch.Tensor, given: torch.Tensor, taken_rows: list[int], given_rows: list[int]
    ) -> None:
        if taken.shape[1]:
            self._group.all_to_all_rows(taken, given, taken_rows, given_rows)

    @property
    def _of_servers(self) -> list[int]:
        return [0] * self.replicas + [1] * self.servers

    @property
    def _of_replicas(self) -> list[int]:
        return [1] * self.replicas + [0] * self.servers
