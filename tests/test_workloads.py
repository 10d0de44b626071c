"""The paper's workloads: sizes at full scale, what they share, data, and that each task trains alone."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from datamodules.generated import Frames, Generated, Tokens
from tasks.encoders import FilterBankStem, LastTokenEncoder
from tasks.generative import token_mean
from tasks.language import LanguageModel, rotated
from tasks.plain import from_plain
from tasks.transformer import Attention, Block, DecoderBlock, Shape, TransformerEncoder
from tasks.workloads import SIZES, task_names, workload_size
from tests.support.workloads import data_of, model_of, size_of

FULL_BATCHES = {
    "multitask_clip": {
        "text_audio": 128,
        "vision_depth": 128,
        "audio_thermal": 128,
        "motion_thermal": 128,
        "vision_text": 128,
        "vision_audio": 64,
        "depth_text": 64,
        "thermal_text": 64,
        "vision_thermal": 64,
        "motion_text": 64,
    },
    "ofasys": {
        "image_captioning": 128,
        "speech_recognition": 128,
        "motion_captioning": 64,
        "visual_grounding": 128,
        "text_infilling": 256,
        "structure_to_text": 128,
        "visual_question_answering": 64,
    },
    "qwen_val": {"vision_language": 64, "audio_language": 64, "vision_audio_language": 32},
}
# Part: the module of that path, millions of parameters, and what they were printed to.
FULL_PARTS = {
    "multitask_clip": [
        ("vision_text.towers.vision", 633, 1),
        ("vision_text.towers.text", 354, 1),
        ("text_audio.towers.audio", 86, 1),
        ("audio_thermal.towers.thermal", 86, 1),
        ("vision_depth.towers.depth", 22, 1),
        ("motion_text.towers.motion", 20, 1),
        ("", 1201, 1),
    ],
    "ofasys": [
        ("image_captioning.trunk", 414, 1),
        ("image_captioning.adaptors.vision", 228, 1),
        ("speech_recognition.adaptors.audio", 29, 1),
    ],
    "qwen_val": [
        ("vision_language.language", 7720, 10),
        ("vision_language.language.blocks.0", 202.4, 0.1),
        ("vision_language.encoders.vision.vision", 1840, 10),
        ("vision_language.encoders.vision.resampler", 92, 1),
        ("audio_language.encoders.audio.audio", 635, 1),
        ("", 10_300, 10),
    ],
}


def millions(module: nn.Module) -> float:
    return sum(parameter.numel() for parameter in module.parameters()) / 1e6


@pytest.mark.parametrize("workload", SIZES)
def test_full_models_have_the_published_sizes(workload: str) -> None:
    """Each part within 1 %, or within what its figure was rounded by."""
    with torch.device("meta"):
        model = model_of(size_of(workload, "full"))
    for path, expected, unit in FULL_PARTS[workload]:
        found = millions(model.tasks.get_submodule(path))
        assert abs(found - expected) <= max(0.01 * expected, unit / 2), f"{path}: {found:.1f} M"


@pytest.mark.parametrize("workload", SIZES)
def test_tasks_in_order_with_their_batches(workload: str) -> None:
    assert size_of(workload, "full").batch_sizes() == FULL_BATCHES[workload]
    small = size_of(workload, "small")
    assert list(small.batch_sizes()) == list(FULL_BATCHES[workload])
    assert task_names(small, 2) == tuple(FULL_BATCHES[workload])[:2]
    for count in (0, len(FULL_BATCHES[workload]) + 1):
        with pytest.raises(ValueError, match=rf"workload\.tasks={count}: there are 1 to"):
            task_names(small, count)


@pytest.mark.parametrize(
    ("workload", "paths"),
    [
        ("multitask_clip", ["text_audio.towers.text", "vision_text.towers.text", "motion_text.towers.text"]),
        ("multitask_clip", ["vision_depth.towers.vision", "vision_thermal.towers.vision"]),
        ("ofasys", ["image_captioning.trunk", "visual_question_answering.trunk"]),
        ("ofasys", ["image_captioning.adaptors.vision", "visual_grounding.adaptors.vision"]),
        ("qwen_val", ["vision_language.language", "audio_language.language"]),
        ("qwen_val", ["audio_language.encoders.audio", "vision_audio_language.encoders.audio"]),
    ],
)
def test_tasks_share_modules(workload: str, paths: list[str]) -> None:
    model = model_of(size_of(workload, "small"))
    assert len({id(model.tasks.get_submodule(path)) for path in paths}) == 1


@pytest.mark.parametrize("workload", SIZES)
def test_largest_batches_are_like_loaded_ones(workload: str) -> None:
    """What a full model is captured with has the keys, types and shapes of what a small one trains on."""
    data = data_of(size_of(workload, "small"))
    for module in data.datamodules.values():
        loaded, largest = next(iter(module.train_dataloader())), module.largest_batch("meta")
        assert list(loaded) == list(largest)
        for name, value in loaded.items():
            assert value.dtype == largest[name].dtype
            assert value.dim() == largest[name].dim()
            assert all(a <= b for a, b in zip(value.shape, largest[name].shape, strict=True)), name


@pytest.mark.parametrize(
    ("workload", "task"),
    [
        ("multitask_clip", "text_audio"),
        ("multitask_clip", "vision_depth"),
        ("ofasys", "speech_recognition"),
        ("ofasys", "visual_question_answering"),
        ("qwen_val", "vision_audio_language"),
    ],
)
def test_tasks_train_alone(workload: str, task: str, tmp_path: Any) -> None:
    """On its own datamodule, under Lightning alone; every parameter learns and the loss falls."""
    size = size_of(workload, "small")
    module, data = model_of(size).tasks[task], data_of(size, batches=1).datamodules[task]
    losses = []

    class Losses(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            losses.append(trainer.callback_metrics["loss"].item())
            assert [n for n, p in pl_module.named_parameters() if p.grad is None] == []

    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[Losses()],
    )
    trainer.fit(module, data)
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------------------------------- the pieces
def test_generated_samples_depend_on_their_index_alone() -> None:
    fields = {"text": Tokens(9, 2, 6), "audio": Frames(3, 4, 8)}
    one, other = Generated(fields, 4, 8), Generated(fields, 2, 4)
    for index in range(4):
        for name, value in one.samples[index].items():
            assert torch.equal(value, other.samples[index][name])
    assert not torch.equal(
        one.samples[0]["audio"][:4], Generated(fields, 4, 8, seed=1).samples[0]["audio"][:4]
    )


def test_generated_lengths_vary_and_padding_is_zero() -> None:
    data = Generated({"text": Tokens(9, 2, 6), "fixed": Tokens(9, 2, 12, fixed=True)}, 32, 64)
    batch = next(iter(data.train_dataloader()))
    lengths = batch["text_length"]
    assert set(lengths.tolist()) == {2, 3, 4, 5, 6}
    assert batch["text"].shape == (32, 6)
    assert batch["fixed"].shape == (32, 12)
    padding = torch.arange(6) >= lengths[:, None]
    assert torch.equal(batch["text"] == 0, padding)
    assert len(set(batch["label"].tolist())) == 32


def test_token_mean_counts_tokens_not_rows() -> None:
    logits, tokens, lengths = torch.randn(3, 4, 7), torch.randint(1, 7, (3, 4)), torch.tensor([4, 1, 2])
    each = [-logits[b, t].log_softmax(0)[tokens[b, t]] for b in range(3) for t in range(lengths[b])]
    torch.testing.assert_close(token_mean(logits, tokens, lengths), torch.stack(each).mean())


def test_causal_attention_sees_nothing_later() -> None:
    block, x = Block(8, 2, causal=True), torch.randn(2, 5, 8)
    torch.testing.assert_close(block(x)[:, :3], block(x[:, :3]))
    decoder, memory = DecoderBlock(8, 2), torch.randn(2, 4, 8)
    torch.testing.assert_close(decoder(x, memory)[:, :3], decoder(x[:, :3], memory))
    real = torch.tensor([[True, True, False, False]] * 2)
    torch.testing.assert_close(decoder(x, memory, real), decoder(x, memory[:, :2]))


def test_bias_token_is_one_key_and_value_more() -> None:
    attention, x = Attention(4, 1, bias_token=True), torch.randn(2, 3, 4)
    assert attention.bias_token is not None
    nn.init.normal_(attention.bias_token)
    query, key, value = attention.qkv(x).chunk(3, dim=-1)
    more = [
        torch.cat([own, extra.expand(2, 1, 4)], 1)
        for own, extra in zip((key, value), attention.bias_token, strict=True)
    ]
    weights = (query @ more[0].transpose(1, 2) / 2).softmax(-1)
    torch.testing.assert_close(attention(x), attention.out(weights @ more[1]))
    mask = torch.tensor([[True, True, False]] * 2)
    torch.testing.assert_close(attention(x, mask)[:, :2], attention(x[:, :2]))


def test_rotary_products_depend_on_distance_alone() -> None:
    query, key = torch.randn(8).expand(1, 6, 8), torch.randn(8).expand(1, 6, 8)
    products = rotated(query, 2) @ rotated(key, 2).transpose(1, 2)
    torch.testing.assert_close(products[0, 3, 1], products[0, 5, 3])
    torch.testing.assert_close(products[0, 2, 2], (query[0, 0] * key[0, 0]).sum())
    assert not torch.isclose(products[0, 3, 1], products[0, 3, 2])


def test_language_model_predicts_each_token_from_those_before() -> None:
    model = LanguageModel(Shape(2, 8, 2, 2.0), 11)
    tokens, features = torch.randint(1, 11, (2, 5)), torch.randn(2, 3, 8)
    logits = model(tokens, [features], 3)
    assert logits.shape == (2, 5, 11)
    later = tokens.clone()
    later[:, 3:] = 0
    torch.testing.assert_close(model(later, [features], 3)[:, :4], logits[:, :4])
    assert not torch.allclose(model(later, [features], 3)[:, 4], logits[:, 4])


def test_text_is_embedded_at_its_last_token() -> None:
    encoder = LastTokenEncoder(TransformerEncoder(5, 8, 1, 2, causal=True), 8, 4, 11)
    tokens = torch.randint(1, 11, (2, 5))
    both = encoder(tokens, torch.tensor([2, 5]))
    torch.testing.assert_close(both[:1], encoder(tokens[:1, :2], torch.tensor([2])))


def test_positions_of_a_filter_bank_see_real_frames_only() -> None:
    stem, frames = FilterBankStem(7, 4), torch.randn(1, 23, 7)
    real = FilterBankStem.positions(15)
    noisy = frames.clone()
    noisy[:, 15:] = 9.0
    torch.testing.assert_close(stem(noisy)[:, :real], stem(frames[:, :15]))
    assert stem(frames).shape[1] == FilterBankStem.positions(23)


def test_sizes_from_configuration_name_what_is_wrong() -> None:
    assert from_plain(Shape, {"layers": 1, "width": 4, "heads": 2}) == Shape(1, 4, 2)
    with pytest.raises(ValueError, match="Shape has no depth; it has layers, width, heads, mlp_ratio"):
        from_plain(Shape, {"layers": 1, "width": 4, "heads": 2, "depth": 3})
    with pytest.raises(ValueError, match=r"Shape: .*'heads'"):
        from_plain(Shape, {"layers": 1, "width": 4})
    with pytest.raises(ValueError, match="there is no workload 'bert'; the workloads are multitask_clip"):
        workload_size("bert", {})
