"""Layout: every element has exactly one owner, whatever the shapes, ranks and kind of cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stateroom.errors import LayoutError
from stateroom.zero.layout import Layout, flat_order

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=9)
worlds = st.integers(1, 9)


def named(list_of_shapes):
    return [(f"p{i}", shape) for i, shape in enumerate(list_of_shapes)]


@given(shapes, worlds, st.booleans())
@settings(max_examples=300, deadline=None)
def test_slices_of_all_ranks_cover_each_element_once(list_of_shapes, world, whole):
    layout = (Layout.whole if whole else Layout.even)(named(list_of_shapes), world)
    seen = {i: [0] * extent.numel for i, extent in enumerate(layout.extents)}
    for rank in range(world):
        low, high = layout.interval(rank)
        for part in layout.slices(low, high):
            extent = layout.extents[part.extent]
            assert low + part.at == extent.offset + part.start  # where it lies in the flat space
            for element in range(part.start, part.stop):
                seen[part.extent][element] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@given(shapes, worlds)
@settings(max_examples=200, deadline=None)
def test_even_cut_pads_once_and_less_than_a_rank_each(list_of_shapes, world):
    layout = Layout.even(named(list_of_shapes), world)
    sizes = {layout.bounds[r + 1] - layout.bounds[r] for r in range(world)}
    assert len(sizes) == 1
    assert 0 <= layout.padded - layout.numel < world


@given(shapes, worlds)
@settings(max_examples=200, deadline=None)
def test_whole_cut_splits_no_parameter_and_is_best(list_of_shapes, world):
    layout = Layout.whole(named(list_of_shapes), world)
    for rank in range(world):
        for part in layout.slices(*layout.interval(rank)):
            assert (part.start, part.stop) == (0, layout.extents[part.extent].numel)
    largest = max(layout.bounds[r + 1] - layout.bounds[r] for r in range(world))
    assert largest == best_largest([extent.numel for extent in layout.extents], world)


def best_largest(numels, world):
    """Smallest possible largest part of a contiguous partition, by dynamic programming."""
    best = [sum(numels[:end]) for end in range(len(numels) + 1)]
    for _ in range(world - 1):
        best = [min(max(best[cut], sum(numels[cut:end])) for cut in range(end + 1)) for end in range(len(numels) + 1)]
    return best[-1]


@given(st.lists(st.integers(0, 100), max_size=12), st.data())
def test_flat_order_is_a_permutation_with_aligned_sizes_first(numels, data):
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(numels), max_size=len(numels)))
    order = flat_order(numels, groups)
    assert sorted(order) == list(range(len(numels)))
    odd = [numels[i] % 8 != 0 for i in order]
    assert odd == sorted(odd)


def test_bad_bounds_are_refused():
    extents = Layout.even([("p", (4,))], 2).extents
    for bounds in ((0, 3, 2), (1, 4), (0, 2)):
        with pytest.raises(LayoutError):
            Layout(extents, bounds)


def test_a_million_ranks_cost_nothing():
    layout = Layout.even([("p", (4096, 4096))], 1_000_000)
    low, high = layout.interval(999_999)
    assert high == layout.padded and high - low == 17
