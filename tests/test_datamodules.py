"""The example data: what the files hold, the batches, the descriptions."""

from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import Digits, Motions, Vowels
from datamodules.text import ALL, PADDING, Descriptions, Tokenizer
from datamodules.ts import read_ts

SPLITS = {Digits: (1437, 360, 10), Vowels: (270, 370, 9), Motions: (40, 40, 4)}


@pytest.fixture(scope="module", params=list(SPLITS), ids=lambda cls: cls.__name__)
def data(request: Any) -> Any:
    data = request.param(batch_size=16)
    data.setup("fit")
    return data


def test_splits_have_the_published_sizes_and_all_classes(data: Any) -> None:
    train, held_out, classes = SPLITS[type(data)]
    assert data.num_classes == classes
    assert len(data.train_dataloader().dataset) == train
    for loader in (data.val_dataloader(), data.test_dataloader()):
        assert len(loader.dataset) == held_out
    for split in (data.train_dataloader().dataset, data.val_dataloader().dataset):
        assert set(split.labels) == set(range(classes))


def test_batches_are_dicts_of_tensors_with_the_same_rows(data: Any) -> None:
    loader = data.train_dataloader()
    batches = list(loader)
    assert sum(len(batch["label"]) for batch in batches) == len(loader.dataset)
    assert len(batches[-1]["label"]) == (len(loader.dataset) % 16 or 16)
    for batch in batches:
        assert len({len(value) for value in batch.values()}) == 1
        assert batch[data.modality].dtype == torch.float32
        assert batch[data.modality].isfinite().all()
        assert batch["text"].shape[1] == batch["text_length"].max()
        assert ((batch["text"] != PADDING).sum(1) == batch["text_length"]).all()


def test_every_epoch_is_another_permutation_of_all_samples(data: Any) -> None:
    loader = data.train_dataloader()
    torch.manual_seed(0)
    epochs = [torch.cat([batch["label"] for batch in loader]) for _ in range(2)]
    assert not torch.equal(*epochs)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == sorted(loader.dataset.labels)


def test_held_out_prompts_are_new_sentences_of_known_words(data: Any) -> None:
    prompts = data.descriptions.prompts()
    training = {t.format(name) for t in data.descriptions.training for name in data.descriptions.names}
    assert training.isdisjoint(prompts)
    tokens, lengths = data.class_prompts()
    assert tokens.shape == (data.num_classes, lengths.max())
    assert len({tuple(row) for row in tokens.tolist()}) == data.num_classes


def test_the_wording_of_a_sample_depends_on_its_index_alone(data: Any) -> None:
    dataset = data.train_dataloader().dataset
    again = type(data)(batch_size=3)
    again.setup("fit")
    texts = [dataset[i][1] for i in range(len(dataset))]
    assert texts == [again.train_dataloader().dataset[i][1] for i in range(len(dataset))]
    assert len(set(texts)) == data.num_classes * len(data.descriptions.training)


def test_digits_are_stratified() -> None:
    digits = Digits(batch_size=16)
    digits.setup("fit")
    counts = torch.bincount(torch.tensor(digits.val_dataloader().dataset.labels))
    assert counts.min() >= 35
    assert counts.max() <= 37


def test_vowels_keep_their_lengths() -> None:
    vowels = Vowels(batch_size=24)
    vowels.setup("fit")
    batches = list(vowels.train_dataloader())
    lengths = torch.cat([batch["audio_length"] for batch in batches])
    assert (lengths.min().item(), lengths.max().item()) == (7, 26)
    assert len({batch["audio"].shape[1] for batch in batches}) > 1
    for batch in batches:
        assert batch["audio"].shape[1:] == (batch["audio_length"].max(), 12)
        for row, length in zip(batch["audio"], batch["audio_length"], strict=True):
            assert (row[length:] == 0).all()
            assert (row[:length] != 0).any(1).all()


def test_read_ts(tmp_path: Path) -> None:
    file = tmp_path / "x.ts"
    file.write_text("# note\n@problemName X\n@classLabel true up down\n@data\n1,2,3:4,5,6:down\n7:8:up\n")
    series, labels = read_ts(file)
    assert [s.tolist() for s in series] == [[[1, 4], [2, 5], [3, 6]], [[7, 8]]]
    assert labels.tolist() == [1, 0]


def test_tokenizer_counts_words_and_pads() -> None:
    tokenizer = Tokenizer(
        [Descriptions(names=("a", "b"), training=("is {}", "{} it is"), held_out="it is {}")]
    )
    tokens, lengths = tokenizer(["is a", "b it is"])
    assert len(tokenizer) == 5
    assert tokens.tolist() == [[1, 2, 0], [3, 4, 1]]
    assert lengths.tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"no training description has: \['c'\]"):
        tokenizer(["is c"])


def test_all_tasks_share_one_vocabulary() -> None:
    assert Digits(8).tokenizer.ids == Vowels(8).tokenizer.ids == Tokenizer(ALL).ids
