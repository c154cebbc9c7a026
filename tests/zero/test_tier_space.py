"""The integers behind tiers: every element has one place, cuts keep the bits, sub-groups are contiguous."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from stateroom.zero.tiers.space import ALIGN, GRAIN, Space, Span, cut_points, padded, sub_groups


@st.composite
def units(draw):
    """Return (start, stop, spans) with gaps between spans."""
    start = draw(st.integers(0, 5000))
    at, spans = start + draw(st.integers(0, 100)), []
    for _ in range(draw(st.integers(0, 6))):
        size = draw(st.integers(1, 30_000))
        spans.append(Span(at, at + size, draw(st.booleans())))
        at += size + draw(st.sampled_from([0, 0, 7]))
    return start, at + draw(st.integers(0, 100)), spans


@given(units(), st.integers(ALIGN, 20_000))
def test_pieces_cover_the_interval_and_respect_the_limit(unit, limit):
    start, stop, spans = unit
    points = cut_points(start, stop, spans, limit)
    assert (points[0], points[-1]) == (start, stop)
    assert all(a < b for a, b in itertools.pairwise(points)) or start == stop
    for low, high in itertools.pairwise(points):
        if high - low > limit + GRAIN:  # only a whole parameter may be larger
            assert any(span.whole and span.start < high and low < span.stop and span.stop - span.start > limit / 2 for span in spans)
    for point in points[1:-1]:
        for span in spans:
            if span.start < point < span.stop:
                assert not span.whole
                assert (point - span.start) % GRAIN == 0


@given(st.lists(units(), min_size=1, max_size=5), st.integers(ALIGN, 20_000))
def test_places_are_apart_and_aligned(many, limit):
    space = Space(limit)
    for number, (start, stop, spans) in enumerate(many):
        tiles = space.add(number, start, stop, spans)
        assert [(t.start, t.stop) for t in tiles] == list(itertools.pairwise([*[t.start for t in tiles], stop])) if tiles else start == stop
    everything = sorted((tile for tiles in space.tiles.values() for tile in tiles), key=lambda tile: tile.base)
    for tile in everything:
        assert tile.base % ALIGN == 0
        assert tile.at(tile.start) == tile.base
    for left, right in itertools.pairwise(everything):
        assert left.end == right.base
    assert space.numel == (everything[-1].end if everything else 0)


@given(st.lists(units(), min_size=1, max_size=5), st.integers(ALIGN, 40_000))
def test_sub_groups_hold_each_tile_once_and_lie_in_one_piece(many, limit):
    space = Space(limit)
    tiles = [tile for number, (start, stop, spans) in enumerate(many) for tile in space.add(number, start, stop, spans)]
    groups = sub_groups(tiles, limit)
    assert [tile for group in groups for tile in group.tiles] == sorted(tiles, key=lambda tile: tile.base)
    for group in groups:
        assert group.numel == sum(padded(tile.stop - tile.start) for tile in group.tiles)
        assert group.numel <= limit or len(group.tiles) == 1
