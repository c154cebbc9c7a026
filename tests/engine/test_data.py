"""The engine's loader: every sample once an epoch over the ranks, in an order that the seed repeats, also after a resume in mid-epoch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from oracle import engine_for, error_of, sgd
from torch import nn
from torch.utils.data import Dataset, IterableDataset

IDS = 19


class Ids(Dataset):
    """Samples are their own numbers."""

    def __init__(self, count=IDS):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(index)


class Stream(IterableDataset):
    """Numbers without a length."""

    def __iter__(self):
        return (torch.tensor(index) for index in range(IDS))


class Model(nn.Module):
    """Remembers the ids it saw."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))
        self.seen = []

    def forward(self, ids):
        self.seen += ids.tolist()
        return (self.w * ids.float().mean()) ** 2 / 100


def new_engine(stage=0, data=None, **keys):
    return engine_for(Model(), stage, sgd(1e-4), training_data=data if data is not None else Ids(), **keys)


def epochs(drop_last, seed, streamed):
    """Three epochs of batches, as lists of ids."""
    engine = new_engine(data=Stream() if streamed else None, dataloader_drop_last=drop_last, seed=seed)
    loader = engine.training_dataloader
    length = None if streamed else len(loader)
    seen = [[batch.tolist() for batch in loader] for _ in range(3)]
    loader.set_epoch(1)
    seen.append([batch.tolist() for batch in loader])
    engine.destroy()
    return length, seen


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_id_once_an_epoch(pools, ranks, drop_last):
    """19 ids, batches of 2: disjoint over ranks, equally many batches, at most ranks - 1 repeats; order by epoch and seed (C47)."""
    found = pools(ranks).run(epochs, drop_last, 5, False)
    for epoch in range(3):
        per_rank = [seen[epoch] for _, seen in found]
        assert len({len(batches) for batches in per_rank}) == 1
        assert all(length == len(batches) for (length, _), batches in zip(found, per_rank, strict=True))
        assert all(len(batch) > 0 for batches in per_rank for batch in batches)
        counts = Counter(index for batches in per_rank for batch in batches for index in batch)
        if drop_last:
            assert max(counts.values()) == 1
            assert all(len(batch) == 2 for batches in per_rank for batch in batches)
            assert sum(counts.values()) == len(per_rank[0]) * 2 * ranks >= IDS - 2 * ranks - ranks
        else:
            assert set(counts) == set(range(IDS))
            assert sum(counts.values()) - IDS == -IDS % ranks <= ranks - 1
    orders = [[[batch for batch in seen[epoch]] for _, seen in found] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2] != orders[0], "the order must change with each epoch"
    assert all(seen[3] == seen[1] for _, seen in found), "set_epoch(1) repeats epoch 1"
    assert [seen for _, seen in pools(ranks).run(epochs, drop_last, 5, False)] == [seen for _, seen in found]
    assert [seen for _, seen in pools(ranks).run(epochs, drop_last, 6, False)] != [seen for _, seen in found]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_an_iterable_dataset_is_dealt_out(pools, ranks, drop_last):
    """No length is known, so ids go round the ranks; all get equally many batches, none an empty one."""
    found = pools(ranks).run(epochs, drop_last, 5, True)
    for epoch in range(3):
        per_rank = [seen[epoch] for _, seen in found]
        assert len({len(batches) for batches in per_rank}) == 1
        assert all(len(batch) > 0 for batches in per_rank for batch in batches)
        counts = Counter(index for batches in per_rank for batch in batches for index in batch)
        if drop_last:
            assert max(counts.values()) == 1 and len(counts) >= IDS - 3 * ranks + 1
        else:
            assert set(counts) == set(range(IDS))
            assert sum(counts.values()) - IDS <= ranks - 1


def resume(folder, stage, way):
    """20 ids, 5 batches of 2 on each of 2 ranks an epoch; save in the middle of epoch 1 and go on in a new engine."""

    def go(engine, updates):
        engine.module.seen.clear()
        if way == "train_batch":
            for _ in range(updates):
                engine.train_batch()
            return list(engine.module.seen)
        done = 0
        while done < updates:
            for ids in engine.training_dataloader:
                engine.backward(engine(ids))
                engine.step()
                done += 1
                if done == updates:
                    break
        return list(engine.module.seen)

    engine = new_engine(stage, Ids(20), seed=3)
    straight = go(engine, 15)
    engine.destroy()
    engine = new_engine(stage, Ids(20), seed=3)
    head = go(engine, 7)
    client = {"nested": {"list": [1, (2, 3)], "tensor": torch.arange(3)}, "rank": engine.global_rank}
    engine.save_checkpoint(folder, tag=way, client_state=client)
    after_save = go(engine, 2) if way == "train_batch" else None
    engine.load_checkpoint(folder, tag=way)  # back to the save in the same engine
    again = go(engine, 8)
    engine.destroy()
    engine = new_engine(stage, Ids(20), seed=3)
    _, client = engine.load_checkpoint(folder, tag=way)
    tail = go(engine, 8)
    engine.destroy()
    return straight, head, after_save, again, tail, client


@pytest.mark.parametrize("way", ["train_batch", "loop"])
def test_resume_in_mid_epoch_sees_each_id_once(pools, way, tmp_path):
    """Ids before and after the resume are the straight run's in its order, each once an epoch; client state comes back (C32)."""
    results = pools(2).run(resume, str(tmp_path), 2, way)
    for epoch in range(3):
        ids = [index for straight, *_ in results for index in straight[10 * epoch : 10 * epoch + 10]]
        assert sorted(ids) == list(range(20))
    for rank, (straight, head, after_save, again, tail, client) in enumerate(results):
        assert head == straight[:14]
        assert after_save is None or after_save == straight[14:18]
        assert tail == straight[14:]
        assert again == straight[14:], "load_checkpoint in a running engine must move its data back too"
        assert client["nested"]["list"] == [1, (2, 3)] and torch.equal(client["nested"]["tensor"], torch.arange(3))
        assert client["rank"] == rank


def odds():
    """Workers, a collate function, a mid-epoch start behind the last batch, and what cannot be loaded from."""
    engine = new_engine(data=Ids(8), collate_fn=lambda items: torch.stack(items) * 10)
    loader = engine.training_dataloader
    scaled = sorted(index for batch in loader for index in batch.tolist())
    loader.load_state_dict({"epoch": 1, "batches": len(loader)})
    finished = [batch.tolist() for batch in loader]
    following = sum(len(batch) for batch in loader)
    state = loader.state_dict()
    iterator = iter(loader)
    next(iterator)
    middle = loader.state_dict()
    engine.destroy()
    engine = new_engine(data=[torch.tensor(index) for index in range(5)])
    from_list = sorted(index for batch in engine.training_dataloader for index in batch.tolist())
    engine.destroy()
    return scaled, finished, following, state, middle, from_list, error_of(lambda: new_engine(data=[]))


def test_other_ways_to_feed_the_loader(pools):
    results = pools(2).run(odds)
    assert sorted(index for scaled, *_ in results for index in scaled) == [10 * index for index in range(8)]
    assert {index for *_, from_list, _ in results for index in from_list} == set(range(5))
    for _, finished, following, state, middle, _, empty in results:
        assert finished == [] and following == 4
        assert state == {"epoch": 3, "batches": 0} and middle == {"epoch": 3, "batches": 1}
        assert empty[0] == "ConfigError"
