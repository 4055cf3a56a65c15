"""`plan_reclaim` against every other plan there could be; the order in which blocks are emptied and filled."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.driver import BooksDriver
from tests.strategies import block_sizes, live_counts
from vtoken.memory.kv_cache_manager import KVCacheManager
from vtoken.memory.reclaim import NOT_OWN, ReclaimPlan, plan_reclaim

Case = tuple[list[list[int]], int, list[int]]  # live tokens a lane and block, block size, spare cells a lane


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.sampled_from((4, 5, 16)))
    live = draw(st.lists(live_counts(size, max_blocks=4), min_size=1, max_size=4))
    return live, size, [draw(st.integers(0, 2 * size)) for _ in live]


def table(live: list[list[int]]) -> np.ndarray:
    """Side by side, some entries not the lane's own."""
    width = 2 * max(map(len, live))
    rows = np.full((len(live), width), NOT_OWN, np.int32)
    for i, counts in enumerate(live):
        rows[i, i % 2 : i % 2 + len(counts)] = counts
    return rows


def plan(case: Case, wanted: int | None = None, max_cost: int | None = None) -> ReclaimPlan:
    live, size, spare = case
    return plan_reclaim(table(live), size, spare_cells=np.array(spare), wanted=wanted, max_cost=max_cost)


def ways_of_a_lane(live: list[int], size: int, spare: int, max_cost: int) -> set[tuple[int, int, int]]:
    """(blocks, copies, lanes touched) of every set of blocks that could be emptied, by trying all."""
    ways = set()
    for given_up in (chosen for k in range(len(live) + 1) for chosen in combinations(range(len(live)), k)):
        counts = [live[i] for i in given_up]
        room = (len(live) - len(counts)) * size
        if max(counts, default=0) <= max_cost and (not any(counts) or room >= sum(live) + spare):
            ways.add((len(counts), sum(counts), int(bool(counts))))
    return ways


def best(case: Case, wanted: int | None, max_cost: int | None) -> tuple[int, int, int]:
    """Most blocks up to `wanted`, then fewest copies, then fewest lanes."""
    live, size, spare = case
    limit = size if max_cost is None else max_cost
    ways = [ways_of_a_lane(counts, size, s, limit) for counts, s in zip(live, spare, strict=True)]
    sums = [tuple(map(sum, zip(*chosen, strict=True))) for chosen in product(*ways)]
    goal = sum(map(len, live)) if wanted is None else wanted
    num_blocks, num_copies, num_lanes = min((-min(blocks, goal), copies, lanes) for blocks, copies, lanes in sums)
    return -num_blocks, num_copies, num_lanes


@given(case=cases(), wanted=st.one_of(st.none(), st.integers(0, 8)), max_cost=st.one_of(st.none(), st.integers(0, 15)))
def test_no_plan_returns_more_or_copies_less(case: Case, wanted: int | None, max_cost: int | None) -> None:
    found, (live, size, spare) = plan(case, wanted, max_cost), case
    assert (found.num_blocks, found.num_copies, found.returned.any(axis=1).sum()) == best(case, wanted, max_cost)
    before = table(live)
    assert not found.returned[before == NOT_OWN].any(), "a block that is not the lane's own"
    assert found.num_blocks == found.returned.sum()
    assert found.num_copies == before[found.returned].sum()
    for counts, gone, num_spare in zip(before, found.returned, spare, strict=True):
        kept = counts[(counts > 0) & ~gone]
        moved = counts[(counts > 0) & gone].sum()
        assert not moved or moved + num_spare <= (size - kept).sum(), "what moves, and the spare cells, must fit"


@given(cases(), st.integers(0, 8), st.integers(0, 15))
def test_what_was_too_dear_is_the_cheapest_of_the_rest(case: Case, wanted: int, max_cost: int) -> None:
    limited, free = plan(case, wanted, max_cost), plan(case, wanted)
    assert limited.num_blocks + len(limited.refused) == free.num_blocks
    assert limited.num_copies + limited.refused.sum() == free.num_copies
    assert (limited.refused > max_cost).all()


@given(cases())
def test_a_full_block_is_never_emptied(case: Case) -> None:
    """So the limit that goes without saying is `block_size - 1` copies a block."""
    live, size, _ = case
    assert (table(live)[plan(case).returned] < size).all()


@pytest.mark.parametrize(
    ("live", "spare", "reason", "returned", "copies"),
    [
        ([1, 1, 1, 1], 0, "packed", 3, 3),
        ([1, 1, 1, 1], 1, "packed", 2, 2),  # one cell is left for the next token
        ([4, 4, 4, 1], 0, "no_gain", 0, 0),
        ([4, 0, 4, 1], 0, "dead_blocks", 1, 0),
        ([2, 4, 2, 0], 0, "packed", 2, 2),
        ([2, 2, 4], 1, "no_gain", 0, 0),  # a block would come back, and be taken again in the next step
        ([2, 1, 4], 1, "packed", 1, 1),
        ([], 0, "no_gain", 0, 0),
        ([0, 0], 1, "dead_blocks", 2, 0),
    ],
)
def test_reasons(live: list[int], spare: int, reason: str, returned: int, copies: int) -> None:
    found = plan_reclaim(np.array([live], np.int32).reshape(1, -1), 4, spare_cells=spare)
    assert (found.reason, found.num_blocks, found.num_copies) == (reason, returned, copies)


def test_too_dear() -> None:
    live = np.array([[3, 3, 3, 3], [3, 4, 1, NOT_OWN]])  # three tokens for a block, or one
    found = plan_reclaim(live, 4, max_cost=2)
    assert (found.reason, found.num_blocks, found.refused.tolist()) == ("packed", 1, [3])
    found = plan_reclaim(live, 4, max_cost=0)
    assert (found.reason, found.num_blocks, found.refused.tolist()) == ("too_dear", 0, [1, 3])
    assert plan_reclaim(live, 4, max_cost=0, wanted=1).refused.tolist() == [1]
    assert plan_reclaim(live, 4, max_cost=2, wanted=1).refused.tolist() == []


def test_the_emptiest_blocks_of_all_sequences_come_first() -> None:
    live = np.array([[2, 3, 3, 4, 4], [1, 1, 5, 5, 5], [2, 2, 6, 6, 0]])
    spare = 1
    returned = [
        [(2, 4)],  # a dead one costs nothing
        [(2, 4), (1, 1)],  # of two with one token each the last
        [(2, 4), (1, 0), (1, 1)],
        [
            (2, 4),
            (1, 0),
            (1, 1),
            (2, 1),
        ],  # not lane 0, though it is as cheap: lane 2 would have to be packed for nothing
    ]
    for wanted, expected in enumerate(returned, start=1):
        found = plan_reclaim(live, 8, spare_cells=spare, wanted=wanted)
        assert sorted(zip(*map(np.ndarray.tolist, np.nonzero(found.returned)), strict=True)) == sorted(expected)


def test_at_the_same_price_few_sequences_are_touched() -> None:
    live = np.array([[1, 1, 8, 8], [1, 1, 1, 8], [1, 1, 1, 8]])
    for wanted, lanes in ((1, [1]), (2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [0, 1, 2])):
        found = plan_reclaim(live, 8, wanted=wanted)
        assert np.flatnonzero(found.returned.any(axis=1)).tolist() == lanes
        assert found.num_copies == wanted


def test_of_blocks_as_full_the_one_that_is_to_go_first_goes() -> None:
    live = np.array([[2, 2, 2, 2]])
    first = np.array([[False, True, False, False]])
    assert plan_reclaim(live, 4, wanted=1, emptied_first=first).returned.tolist() == [[False, True, False, False]]
    assert plan_reclaim(live, 4, wanted=1).returned.tolist() == [[False, False, False, True]]


def test_nobody_is_asked() -> None:
    found = plan_reclaim(np.zeros((0, 0), np.int32), 4)
    assert (found.reason, found.num_blocks) == ("no_gain", 0)


# --- in the books ----------------------------------------------------------------------------------------------------


def with_counts(counts: list[list[int]], size: int = 4, **settings: bool) -> BooksDriver:
    """Sequences with so many live tokens in each block, the last ones of the block."""
    books = BooksDriver(size, num_blocks=sum(map(len, counts)), **settings)
    for live in counts:
        lane = books.compute([lane % 3 for lane in range(size * len(live))], publish=False)
        dead = [e * size + offset for e, n in enumerate(live) for offset in range(size - n)]
        books.evict({lane: dead})
    return books


def filled(books: BooksDriver, lane: int) -> list[int]:
    return [state.filled for state in books.manager.table(lane)]


def test_the_fullest_blocks_are_filled_so_that_the_emptiest_stay_cheap() -> None:
    books = with_counts([[2, 1, 3, 1]])
    assert books.reclaim(0, wanted=1) == 1
    assert filled(books, 0) == [2, 1, 4]
    assert books.reclaim(0) == 1
    assert books.manager.counters.tokens_relocated == 2


def test_across_the_pool_the_cheapest_blocks_come_back() -> None:
    books = with_counts([[3, 3, 3, 3], [4, 4], [1, 2, 4], [2, 1, 1]])
    found = books.manager.reclaim([0, 1, 2, 3], wanted=3)
    assert [(lane, len(copy)) for lane, copy in found.copies] == [(2, 1), (3, 2)]
    assert found.num_blocks == 3
    assert [filled(books, lane) for lane in range(4)] == [[3, 3, 3, 3], [4, 4], [3, 4], [4]]
    found = books.manager.reclaim([0, 1, 2, 3], wanted=3)
    assert [(lane, len(copy)) for lane, copy in found.copies] == [(0, 3)], "there is no more than one"


def test_a_sequence_that_goes_on_keeps_the_cells_it_needs() -> None:
    books = with_counts([[2, 2], [2, 1], [1, 1, 2]])
    assert books.reclaim([0, 1, 2], spare_cells=[1, 1, 3]) == 2
    assert [filled(books, lane) for lane in range(3)] == [[2, 2], [3], [1, 3]]
    placement = books.manager.plan_extend(np.arange(3), np.array([1, 1, 3]))
    assert placement.num_blocks == 0, "nobody takes back in the next step what it gave"


def test_a_shared_block_comes_back_when_the_last_holder_lets_go() -> None:
    books = BooksDriver()
    lane = books.compute([i % 3 for i in range(9)], publish=False)
    twin, third = books.fork(lane), books.fork(lane)
    books.evict({holder: [0, 1, 2, 3] for holder in (lane, twin, third)})
    assert books.reclaim([lane, twin]) == 0, "the third still holds it"
    assert books.manager.counters.blocks_reclaimed == 0
    assert books.reclaim([third]) == 1


def test_a_block_that_another_lets_go_is_packed_in_the_same_breath() -> None:
    books = BooksDriver()
    lane = books.compute([i % 3 for i in range(8)], publish=False)
    twin = books.fork(lane)
    books.evict({lane: [1, 2, 3, 5, 6, 7], twin: list(range(8))})
    assert books.reclaim([lane, twin]) == 1
    assert filled(books, lane) == [2]


def test_a_price_that_is_too_high() -> None:
    manager = KVCacheManager(8, 4, max_cost_per_block=1)
    lane = manager.admit(16)
    assert lane is not None
    manager.extend(manager.plan_extend(np.array([lane]), np.array([16])))
    dead = np.array([0, 1, 4, 5, 8, 9, 12, 13])
    manager.evict(np.full(len(dead), lane), dead)
    found = manager.reclaim([lane], wanted=1)
    assert (found.copies, found.num_blocks) == ((), 0)
    assert (found.decision.verdict, found.decision.cost, found.decision.value) == ("too_dear", 2, 4)
    manager.evict(np.array([lane]), np.array([2]))
    assert manager.reclaim([lane]).num_blocks == 1


# --- without reuse of cells ------------------------------------------------------------------------------------------


def test_without_reuse_survivors_are_packed_to_the_front() -> None:
    """Tokens at the ends of their blocks: the cells that become free must lie behind all of them."""
    books = with_counts([[1, 1, 1, 1, 1, 1]], reuse_cells=False)
    assert books.reclaim(0, spare_cells=1) == 4
    assert books.manager.blocks.live_rows(0).tolist() == [0, 1, 2, 3, 4, 5]
    assert books.manager.plan_extend(np.array([0]), np.array([3])).rows.tolist() == [6, 7, 8]
    assert books.manager.usage().holes == 0


def test_without_reuse_a_sequence_is_packed_as_a_whole() -> None:
    books = with_counts([[2, 2, 2, 2], [1, 1, 1, 1]], reuse_cells=False)
    assert books.reclaim([0, 1], wanted=1) == 3
    assert [filled(books, lane) for lane in range(2)] == [[2, 2, 2, 2], [4]]


def test_without_reuse_a_block_may_be_left_for_tokens_to_come() -> None:
    books = with_counts([[1, 1, 1, 1]], reuse_cells=False)
    assert books.reclaim(0, spare_cells=4) == 2
    assert filled(books, 0) == [4, 0]
    assert books.manager.usage().reserved_blocks == 1
    assert books.manager.plan_extend(np.array([0]), np.array([4])).num_blocks == 0


def left_by_its_fork(own: list[int], *, moved: bool = False) -> BooksDriver:
    """Lane 0 of five blocks without reuse, in which its fork gave up those named: lane 0 has 1, 1 and 2 live tokens in
    them. `moved`: a copy beside, of a token within the first block, was under way when it forked."""
    books = BooksDriver(reuse_cells=False)
    lane = books.compute([i % 3 for i in range(20)], publish=False)
    if moved:
        books.evict({lane: [0]})
        books.relocate(lane, [1], [0], beside=True)
    twin = books.fork(lane)
    books.evict({twin: [4 * entry + offset for entry in own for offset in range(4)]})
    books.reclaim(twin)
    books.evict({lane: [4 * e + offset for e, n in zip(own, (1, 1, 2), strict=True) for offset in range(4 - n)]})
    return books


@pytest.mark.parametrize(
    ("own", "moved", "returned", "left"),
    [
        ([2, 3, 4], False, 1, [4, 4, 4, 0]),  # behind all that lives: left for the next token
        ([1, 2, 3], False, 2, [4, 4, 4]),  # before a shared block
        ([2, 3, 4], True, 2, [3, 4, 4]),  # while a copy holds the tail where it is
    ],
)
def test_without_reuse_no_block_is_left_where_no_token_can_come(
    own: list[int], moved: bool, returned: int, left: list[int]
) -> None:
    books = left_by_its_fork(own, moved=moved)
    assert books.reclaim(0, spare_cells=1) == returned
    assert filled(books, 0) == left
    decision = books.manager.decisions.latest
    assert decision is not None
    assert decision.blocks_returned == returned


@settings(max_examples=30)
@given(size=block_sizes(), kept=st.lists(st.booleans(), min_size=1, max_size=60), data=st.data())
def test_fragmentation_is_the_share_of_holes(size: int, kept: list[bool], data: st.DataObject) -> None:
    books = BooksDriver(size, num_blocks=20)
    lanes = [books.compute([lane] * data.draw(st.integers(1, 3 * size))) for lane in range(3)]
    assert books.manager.fragmentation(lanes) == books.manager.fragmentation([]) == 0.0
    for lane in lanes:
        books.evict({lane: [p for p in sorted(books.lanes[lane].live) if not kept[p % len(kept)]]})
    chosen = lanes[: data.draw(st.integers(1, 3))]
    num_rows = int(books.manager.tokens.num_rows[chosen].sum())
    num_live = sum(len(books.lanes[lane].live) for lane in chosen)
    assert books.manager.fragmentation(chosen) == pytest.approx(1 - num_live / num_rows)


def test_blocks_held_for_tokens_that_never_came_are_trimmed() -> None:
    books = BooksDriver(block_size=4, num_blocks=10)
    lane = books.manager.admit(4 * 7)
    assert lane is not None
    manager = books.manager
    manager.extend(manager.plan_extend(np.array([lane]), np.array([6])))
    assert manager.trim([lane]) == 5
    assert manager.counters.blocks_trimmed == 5
    assert len(manager.blocks.held(lane)) == 2
    assert manager.trim([lane]) == 0
    manager.extend(manager.plan_extend(np.array([lane]), np.array([9])))  # and grows again as it likes
    manager.check()
    with pytest.raises(ValueError, match="each lane once"):
        manager.trim([lane, lane])
