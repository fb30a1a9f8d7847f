"""What is sent arrives, behind it is zero, and where it lies never depends on what it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrum_rpc.attention.staging import BORDER, Layout, Staging
from ferrum_rpc.sampling.transfer import Marker, to_device, to_host

LAYOUT = Layout(((np.int64, 3), (np.int32, 5), (np.int32, 0), (np.int32, 40)))


def integers(*values: int, kind: type = np.int32) -> np.ndarray:
    return np.array(values, dtype=kind)


@pytest.fixture
def opened(device):
    """A staging buffer and the sections of `LAYOUT`."""
    staging = Staging(device)
    return staging, staging.open(LAYOUT)


def test_sections_arrive_in_their_types_each_at_a_border(opened):
    staging, sections = opened
    staging.send(LAYOUT, [integers(1, 1 << 40, 3, kind=np.int64), integers(4, 5), integers(), integers(*range(40))])
    assert [each.tolist() for each in sections] == [[1, 1 << 40, 3], [4, 5, 0, 0, 0], [], list(range(40))]
    assert [each.dtype for each in sections] == [torch.int64, torch.int32, torch.int32, torch.int32]
    assert all(each.data_ptr() % BORDER == sections[0].data_ptr() % BORDER for each in sections if len(each))


def test_a_shorter_array_leaves_zeros_where_a_longer_one_was(opened):
    staging, sections = opened
    staging.send(LAYOUT, [integers(9, 9, 9, kind=np.int64), integers(9, 9, 9, 9, 9), integers(), integers(9)])
    staging.send(LAYOUT, [integers(1), integers(2), integers(), integers()])  # narrow ones fit into a wide section
    assert [each.tolist() for each in sections[:3]] == [[1, 0, 0], [2, 0, 0, 0, 0], []]


def test_what_has_no_room_is_not_sent(opened):
    staging, sections = opened
    staging.send(LAYOUT, [integers(1, 2, 3, kind=np.int64), integers(4), integers(), integers(5)])
    with pytest.raises(ValueError, match="section of 5"):
        staging.send(LAYOUT, [integers(7, kind=np.int64), integers(*range(6)), integers(), integers()])
    assert sections[0].tolist() == [1, 2, 3] and sections[1].tolist() == [4, 0, 0, 0, 0]


def test_views_stay_where_they_are_as_long_as_there_is_room(device):
    """What a graph reads."""
    staging = Staging(device, LAYOUT.nbytes)
    places = [each.data_ptr() for each in staging.open(LAYOUT)]
    small = Layout(((np.int32, 8),))
    staging.open(small)
    staging.send(small, [integers(*range(8))])
    assert [each.data_ptr() for each in staging.open(LAYOUT)] == places


def test_a_larger_layout_makes_room(device):
    staging = Staging(device)
    for count in (1, 100, 3, 5000):
        layout = Layout(((np.int64, count),))
        [section] = staging.open(layout)
        staging.send(layout, [np.arange(count)])
        assert section.tolist() == list(range(count))


def test_rows_come_back_dense_and_complete(device):
    wide = to_device(torch.arange(24.0).view(4, 6), device)
    columns = [wide[:, ::2], (wide[0] > 2), wide.to(torch.int64).argmax(-1)]
    found = to_host(columns)
    mark = Marker(device)
    mark.wait()
    assert mark.passed()
    assert all(each.device.type == "cpu" and each.is_contiguous() for each in found)
    assert found[0].tolist() == torch.arange(24.0).view(4, 6)[:, ::2].tolist()
    assert found[1].tolist() == [False] * 3 + [True] * 3 and found[2].tolist() == [5] * 4
