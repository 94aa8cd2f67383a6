"""Laws of servers: they add up every piece of every stage, beside all devices; prices and refusals follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from methods.test_clan import CONFIG, GRAPH, ORDERS, compressed
from predict.cost.machines import CPU, GPU, INSIDE
from program.mutations import without_edge, without_row
from program.rendezvous import stuck_rows
from small_plans import make_plan, make_program

from weft.describe.cluster import Cluster, Link, NodeGroup
from weft.describe.contract import Contract
from weft.describe.job import Job
from weft.describe.layout import Layout, PartialLayout
from weft.describe.plan import Choice, Plan
from weft.describe.plan_file import check_plan
from weft.describe.reading import parse_toml
from weft.describe.request import request_of
from weft.describe.run_file import RunFile, parse_run
from weft.describe.servers import hosts_behind, refuse_servers, server_words, without_servers
from weft.errors import InputError
from weft.methods.clan.kinds import AGGREGATE, EXCHANGE, PULL_FROM_SERVERS, PUSH_TO_SERVERS
from weft.methods.clan.options import IN_FLIGHT, NAME, ClanOptions
from weft.methods.clan.pieces import PiecedStages, exchange_wire
from weft.moves.layout import refuse
from weft.planning.compile import compile_folded, compile_part
from weft.planning.planned import plan_run
from weft.planning.planners.homogeneous import UniformPlanner
from weft.planning.problem import problem_of
from weft.planning.sync_comparison import sync_figures
from weft.planning.synchronisations import synchronised_in_each
from weft.predict.cost.memory import with_slack
from weft.predict.cost.network import Network
from weft.predict.cost.placed_plan import CostModel
from weft.predict.cost.price import price
from weft.predict.predict import predict
from weft.program.program import NONE, Program
from weft.program.rank_program import digests, part_of
from weft.program.verify import verify

SLOW = Link(1e6, 0.0)


def hosts(workers: int, servers: int, link: Link = SLOW) -> Cluster:
    """Nodes of one device, the servers' in a group of their own behind the others."""
    groups = [("worker", workers)] + [("host", servers)] * bool(servers)
    names = [name for name, _ in groups]
    return Cluster(
        name="hosts",
        groups=tuple(
            NodeGroup(name=name, count=count, device=CPU, devices=1, link=INSIDE) for name, count in groups
        ),
        links={(min(one, other), max(one, other)): link for one in names for other in names},
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("servers", [1, 3])
def test_servers_add_up_all_pieces_in_an_order_that_all_devices_have(
    order: tuple[str, int, int], servers: int
) -> None:
    plan = compressed(*order, servers=servers)
    program, stages = make_program(CONFIG, plan), PiecedStages.of(plan, GRAPH)
    assert stages is not None
    assert verify(program) == []
    assert not stuck_rows(program)
    columns = program.columns
    on_servers = columns.replica == NONE
    assert set(columns.rank[on_servers].tolist()) == set(plan.servers)
    assert set(columns.kind[on_servers].tolist()) == {PUSH_TO_SERVERS, AGGREGATE, PULL_FROM_SERVERS}
    assert not (columns.kind[~on_servers] == AGGREGATE).any()
    meets = np.isin(columns.kind, (PUSH_TO_SERVERS, PULL_FROM_SERVERS))
    for server in plan.servers:
        mine = meets & (columns.rank == server)
        assert mine.sum() == 2 * sum(stages.pieces)
        for stage in range(len(stages.pieces)):
            # Every replica of the stage meets it in the same order.
            alike = [
                list(zip(columns.kind[rows].tolist(), columns.part[rows].tolist(), strict=True))
                for rank in {server, *columns.rank[meets & (columns.stage == stage)].tolist()}
                for rows in [np.flatnonzero(meets & (columns.stage == stage) & (columns.rank == rank))]
                if rank == server or len(rows)
            ]
            assert all(one == alike[0] for one in alike)


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[1], ORDERS[4]])
def test_the_part_of_a_server_is_that_of_the_whole_program(order: tuple[str, int, int]) -> None:
    plan = compressed(*order, servers=2)
    program = make_program(CONFIG, plan)
    for rank, digest in enumerate(digests(program).tolist()):
        alone, taken = compile_part(plan, GRAPH, rank), part_of(program, rank)
        assert alone.digest == taken.digest == digest
        assert alone.groups == taken.groups
        assert (alone.stages == ()) == (rank in plan.servers)
    with pytest.raises(InputError, match="6 holds no stage; ranks 0 to"):
        compile_part(compressed(servers=2), GRAPH, 6)


def _on_server(program: Program, kind: int) -> int:
    columns = program.columns
    return int(np.flatnonzero((columns.kind == kind) & (columns.replica == NONE))[0])


def _without_server(program: Program) -> Program:
    """Nothing is left on the last rank."""
    while (rows := np.flatnonzero(program.columns.rank == program.ranks - 1)).size:
        program = without_row(program, int(rows[-1]))
    return program


def _without_a_server_in_groups(program: Program) -> Program:
    last = program.ranks - 1
    groups = tuple(tuple(rank for rank in one if rank != last) for one in program.groups)
    return replace(_without_server(program), groups=groups)


def _twice(program: Program) -> Program:
    part, row = program.columns.part.copy(), _on_server(program, AGGREGATE)
    part[row] += 1
    return replace(program, columns=replace(program.columns, part=part))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        *(
            (lambda program, kind=kind: without_row(program, _on_server(program, kind)), "")
            for kind in (PUSH_TO_SERVERS, AGGREGATE, PULL_FROM_SERVERS)
        ),
        *(
            (
                lambda program, kind=kind: without_edge(
                    program, int(np.flatnonzero(program.edges.source == _on_server(program, kind))[0])
                ),
                "",
            )
            for kind in (PUSH_TO_SERVERS, AGGREGATE)
        ),
        (_without_server, "adds up stage 0, piece 0 0 times"),
        (_without_a_server_in_groups, "not with the replicas of its reduction and all servers"),
        (_twice, "adds up stage 0, piece 0 0 times"),
    ],
)
def test_a_program_whose_servers_do_something_else_is_refused(
    broken: Callable[[Program], Program], said: str
) -> None:
    found = verify(broken(make_program(CONFIG, compressed(servers=2))))
    assert found
    assert said in "; ".join(str(one) for one in found)


@pytest.mark.parametrize(
    ("workers", "servers", "parts"), [(2, 1, 2.0), (2, 2, 1.0), (4, 1, 4.0), (4, 2, 2.0), (2, 4, 1.0)]
)
def test_the_narrower_end_of_an_exchange_decides_its_time(workers: int, servers: int, parts: float) -> None:
    """A server takes its share of all replicas' bytes, and a replica gives all of its own."""
    where = hosts(workers, servers, Link(1e6, 0.5))
    ranks = range(workers), range(workers, workers + servers)
    for senders, receivers in (ranks, ranks[::-1]):
        # What a replica gives in all is what it takes; of a server it is the same bytes of each replica.
        given = 1000 if senders == ranks[0] else 1000 * workers // servers
        found = Network(cluster=where).many_to_many(senders, receivers, given)
        assert found.link_s == pytest.approx(parts * 1000 / 1e6)
        assert found.seconds == pytest.approx(0.5 + found.link_s)


def test_ranks_of_one_node_share_its_link() -> None:
    inside = replace(hosts(1, 1), groups=tuple(replace(one, devices=3) for one in hosts(1, 1).groups))
    network = Network(cluster=inside)
    assert network.many_to_many(range(3), range(3, 6), 300).link_s == pytest.approx(900 / 1e6)
    alone = network.many_to_many([0, 1], [2], 100)
    assert alone.link_s == 0.0
    assert alone.seconds == pytest.approx(INSIDE.latency_s + 200 / INSIDE.bytes_per_s)


def served(*order: str | int, dp: int = 2, **options: object) -> Plan:
    """As on CPUs, which compute in fp32."""
    return compressed(*order, dp=dp, **options).model_copy(update={"precision": "fp32"})


def _priced(plan: Plan, where: Cluster) -> tuple[Program, np.ndarray, np.ndarray]:
    program = make_program(CONFIG, plan)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs
    return program, costs.occupancy, costs.base_bytes


@pytest.mark.parametrize(("dp", "servers"), [(2, 1), (2, 2), (4, 2)])
def test_exchanges_and_sums_of_servers_have_their_price(dp: int, servers: int) -> None:
    plan = served(dp=dp, servers=servers, codec="scaled-sign")
    program, occupancy, _ = _priced(plan, hosts(dp, servers))
    columns = program.columns
    for kind in (PUSH_TO_SERVERS, PULL_FROM_SERVERS):
        rows = np.flatnonzero(columns.kind == kind)
        expected = (
            max(1.0, dp / servers) * exchange_wire(plan).between * columns.bytes[rows] / SLOW.bytes_per_s
        )
        assert occupancy[rows] / 1e9 == pytest.approx(expected, rel=1e-3)
    among = served(dp=dp, codec="scaled-sign")
    sums = []
    for one, where in ((among, hosts(dp, 0)), (plan, hosts(dp, servers))):
        program, occupancy, _ = _priced(one, where)
        rows = (program.columns.kind == AGGREGATE) & (program.columns.rank == one.ranks - 1)
        sums.append(int(occupancy[rows].sum()))
    assert sums[1] == pytest.approx(dp / servers * sums[0], rel=1e-3)


def test_a_server_holds_its_errors_and_the_codes_under_way() -> None:
    held = {}
    for errors in ("kept", "dropped"):
        plan = served(codec="scaled-sign", servers=2, errors=errors)
        held[errors] = _priced(plan, hosts(2, 2))[2]
    options, stages = ClanOptions.model_validate(dict(plan.sync.options)), PiecedStages.of(plan, GRAPH)
    assert stages is not None
    owned = -(-stages.piece_bytes[0] // 2)
    for server in plan.servers:
        added = held["kept"][server] - held["dropped"][server]
        assert added == pytest.approx(with_slack(np.array(owned)), abs=2)
        codes = owned / stages.pieces[0] * options.block_bytes / (4 * options.block)
        assert held["dropped"][server] > min(IN_FLIGHT, stages.pieces[0]) * 3 * codes
    # Without servers, each of two replicas owns as much.
    among = _priced(served(codec="scaled-sign", errors="kept"), hosts(2, 0))[2]
    assert among[0] - held["kept"][0] == pytest.approx(with_slack(np.array(owned)), abs=2)


def test_more_servers_shorten_a_step_over_slow_links() -> None:
    steps, sent = [], []
    for servers in (1, 2, 4):
        plan, where = served(dp=4, servers=servers), hosts(4, servers, Link(1e6, 1e-5))
        model = CostModel(graph=GRAPH, cluster=where)
        whole = predict(model, plan, make_program(CONFIG, plan)).prediction
        folded = predict(model, plan, compile_folded(plan, GRAPH, where)).prediction
        assert folded.step_s == pytest.approx(whole.step_s, rel=1e-6)
        assert len(whole.peak_bytes) == plan.ranks
        steps.append(whole.step_s)
        sent.append(sync_figures(model, plan).traffic.between_bytes)
    assert steps == sorted(steps, reverse=True)
    assert sent == sorted(sent, reverse=True)
    assert steps[0] > 1.5 * steps[2]


def test_exchanges_of_two_stages_meet_at_their_server_and_both_directions_are_apart() -> None:
    plan, where = served("1f1b", 2, 1, servers=1), hosts(4, 1)
    program = make_program(CONFIG, plan)
    costs = price(CostModel(graph=GRAPH, cluster=where), program, plan).costs

    def links(kind: int, stage: int) -> set[int]:
        rows = np.flatnonzero((program.columns.kind == kind) & (program.columns.stage == stage))
        return set(costs.group_links[program.columns.group[rows[0]]])

    there, back = ([links(kind, stage) for stage in (0, 1)] for kind in (PUSH_TO_SERVERS, PULL_FROM_SERVERS))
    for each in (there, back):
        # Of the server, and of the nodes of two replicas, which exchange nothing with each other.
        assert [len(one) for one in each] == [3, 3]
        assert len(each[0] & each[1]) == 1
    assert not set.union(*there) & set.union(*back)


def test_a_piece_comes_back_while_the_next_goes_to_the_servers() -> None:
    plan, where = served(dp=4, servers=4, piece_bytes=4096), hosts(4, 4, Link(1e5, 0.0))
    model = CostModel(graph=GRAPH, cluster=where)
    timeline = predict(model, plan, make_program(CONFIG, plan)).simulation.timeline
    mine = (timeline.rank == 0) & (timeline.step == 0)
    pulls, pushes = (
        [
            (timeline.start_ns[row], timeline.end_ns[row])
            for row in np.flatnonzero(mine & (timeline.kind == kind))
        ]
        for kind in (PULL_FROM_SERVERS, PUSH_TO_SERVERS)
    )
    first, last = pulls[0]
    assert any(max(first, start) < min(last, end) for start, end in pushes[1:])
    # Replicas that own the sums use both directions of their links in either exchange.
    among = served(dp=4, piece_bytes=4096)
    alone = predict(
        CostModel(graph=GRAPH, cluster=hosts(4, 0, Link(1e5, 0.0))), among, make_program(CONFIG, among)
    )
    assert (
        timeline.end_ns[mine].max()
        < 0.85 * alone.simulation.timeline.end_ns[alone.simulation.timeline.step == 0].max()
    )


LAYOUT = Layout(pp=1, dp=2, loops=1, micro_batch_size=1, schedule="1f1b", sync=NAME)


def job(where: Cluster, servers: int, **options: str) -> Job:
    return Job(
        graph=GRAPH,
        cluster=where,
        global_batch=8,
        sequence=GRAPH.sequence,
        sync_options={"servers": servers},
        transport=options.get("transport"),
    )


MIXED = replace(
    hosts(2, 1), groups=(replace(hosts(2, 1).groups[0], device=GPU, devices=2), hosts(2, 1).groups[1])
)


@pytest.mark.parametrize(
    ("where", "servers", "layout", "options", "expected"),
    [
        (hosts(2, 1), 1, LAYOUT, {}, None),
        (hosts(2, 1), 2, LAYOUT, {}, "2 servers of 3 devices leave 1 for stages, and these use 2"),
        (hosts(2, 1), 9, LAYOUT, {}, "9 servers of 3 devices leave 0 for stages"),
        (hosts(8, 1), 1, replace(LAYOUT, tp=2), {}, "replicas of 2 ranks hold parts of them; nearest tp: 1"),
        (MIXED, 1, replace(LAYOUT, dp=4), {"transport": "host"}, None),
        (MIXED, 1, replace(LAYOUT, dp=4), {}, "transport 'device' needs one on both ends; nearest"),
        (MIXED, 1, LAYOUT, {"transport": "host"}, "server 0 would be rank 2, a gpu; servers are"),
        (hosts(2, 1), 1, LAYOUT, {"transport": "device"}, "nearest run.transport: host"),
    ],
)
def test_layouts_without_room_for_servers_are_refused_in_one_line(
    where: Cluster, servers: int, layout: Layout, options: dict[str, str], expected: str | None
) -> None:
    reason = refuse(job(where, servers, **options), layout)
    assert (reason is None) == (expected is None)
    assert expected is None or expected in str(reason)


def test_a_plan_file_with_servers_in_the_wrong_place_is_refused() -> None:
    where = hosts(2, 1)
    plan = make_plan(CONFIG, pp=1, dp=2, precision="fp32")
    told = {"cluster": where.name, "cluster_fingerprint": where.fingerprint}

    def problems(servers: object) -> list[str]:
        sync = Choice(name=NAME, options={"servers": servers})  # type: ignore[dict-item]
        changed = plan.model_copy(update={**told, "sync": sync})
        return [str(one) for one in check_plan(changed, GRAPH, where)]

    assert problems(1) == []
    assert ["2 servers of 3 devices leave 1" in one for one in problems(2)] == [True]
    assert ["servers: " in one for one in problems("many")] == [True]


def test_servers_are_named_by_their_nodes() -> None:
    assert (
        server_words(range(2, 4), hosts(2, 2)) == "server 0 on host 0 (rank 2), server 1 on host 1 (rank 3)"
    )
    assert server_words(range(2, 3), hosts(2, 1)) == "server 0 on host (rank 2)"
    assert refuse_servers(2, 0, hosts(2, 1)) is None


def test_hosts_behind_accelerators_may_be_servers() -> None:
    assert hosts_behind(MIXED) == 1
    # Between nodes of one kind, nothing says which of them hold stages.
    assert hosts_behind(hosts(2, 1)) == 0
    turned = replace(MIXED, groups=MIXED.groups[::-1])
    assert hosts_behind(turned) == 0


@pytest.mark.parametrize("transport", ["host", "device"])
def test_a_choice_of_methods_tries_servers_where_there_are_hosts(transport: str) -> None:
    found = problem_of(
        model="gpt-10m",
        on="4xa100-80gb",
        global_batch=16,
        pins=PartialLayout(pp=1, dp=4, schedule="1f1b", micro_batch_size=4),
        contract=Contract.EMPIRICAL,
        precision="fp32",
    )
    where = hosts(4, 4, Link(1e7, 1e-6))
    workers = replace(where.groups[0], device=found.job.cluster.groups[0].device)
    where = replace(where, groups=(workers, where.groups[1]))
    dense = replace(found, job=replace(found.job, cluster=where, transport=transport))
    tried = synchronised_in_each(UniformPlanner().search(dense), 200)
    answers = {tuple(sorted(one.sync.options.items())): one for one in tried if one.sync.name == NAME}
    assert len(answers) == 8
    for options, one in answers.items():
        if "servers" not in dict(options):
            continue
        if transport == "device":
            assert "nearest run.transport: host" in one.reason
            continue
        alone = answers[tuple(pair for pair in options if pair != ("servers", 4))]
        assert one.fits
        assert one.candidate is not None
        assert alone.candidate is not None
        # In many pieces, pushes and pulls run side by side. One number of a thousand hardly uses the links.
        shorter = one.candidate.step_s < alone.candidate.step_s
        assert shorter == (("codec", "top-k") not in options)


def test_servers_do_not_decide_the_precision() -> None:
    sync = Choice(name=NAME, options={"servers": 1})
    for where, precision in ((MIXED, "bf16"), (hosts(2, 1), "fp32")):
        assert request_of(CONFIG, where, sync=sync).job.precision == precision
    with pytest.raises(InputError, match="'bf16' is not supported by cpu"):
        request_of(CONFIG, MIXED, sync=Choice(name=NAME), precision="bf16")
    assert without_servers(MIXED, 1).groups == MIXED.groups[:1]
    assert without_servers(MIXED, 2) == without_servers(MIXED, 5) == without_servers(MIXED, 1)


RUN = """
[model]
preset = "gpt-1m"
[task]
sequence = 32
[train]
global_batch = 12
[cluster]
use = "{use}"
[goal]
contract = "empirical"
[plan]
dp = {dp}
pp = 1
[sync]
method = "clan"
codec = "top-k"
ratio = 16.0
servers = {servers}
"""


def run_of(use: Path, servers: int) -> RunFile:
    return parse_run(parse_toml(RUN.format(use=use, servers=servers, dp=4 - servers), "run.toml"))


CLUSTER = """
[[node]]
name = "host"
count = 3
device = "core"
devices = 1
bandwidth = "4 GB/s"
latency = "20 us"
[[node]]
name = "server"
count = 1
device = "small"
devices = 1
bandwidth = "4 GB/s"
latency = "20 us"
[[link]]
between = ["host", "host"]
bandwidth = "1 Gbit/s"
latency = "100 us"
[[link]]
between = ["host", "server"]
bandwidth = "1 Gbit/s"
latency = "100 us"
[device.core]
memory = "4 GB"
memory_bandwidth = "10 GB/s"
flops = {{ fp32 = "50 GFLOP/s" }}
launch = "5 us"
synchronous = true
[device.small]
memory = "{memory}"
memory_bandwidth = "10 GB/s"
flops = {{ fp32 = "50 GFLOP/s" }}
launch = "5 us"
synchronous = true
"""


def test_a_search_leaves_the_last_devices_to_servers(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(CLUSTER.format(memory="4 GB"))
    for servers in (1, 2):
        plan = plan_run(run_of(path, servers)).plan
        assert (plan.servers.start, plan.ranks) == (4 - servers, 4)


def test_a_server_without_memory_for_its_errors_is_refused_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "hosts.toml"
    path.write_text(CLUSTER.format(memory="4 MB"))
    with pytest.raises(InputError, match=r"rank 3, server 0, would need .* more than its device has"):
        plan_run(run_of(path, 1))


def test_the_exchange_of_replicas_alone_is_as_before() -> None:
    program = make_program(CONFIG, compressed())
    assert set(EXCHANGE) <= set(program.columns.kind.tolist())
    assert not (program.columns.replica == NONE).any()
